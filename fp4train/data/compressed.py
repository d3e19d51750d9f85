"""Files as they are, or unpacked where they begin as gzip or zstd do; what a file is called does
not matter.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from fp4train.data.containers import SKIPPABLE, ZSTD
from fp4train.errors import DataError, reason
from fp4train.stores import native_file

GZIP = b"\x1f\x8b"
SUFFIXES = (".gz", ".zst")


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, some at a time: memory does not grow with it.

    Raises:
        DataError: it cannot be read, or is cut off or damaged; also where the block reads.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(ZSTD))
            file.seek(0)
            is_zstd = head == ZSTD or SKIPPABLE.match(head) is not None
            if is_zstd or head.startswith(GZIP):
                with _zstd(path) if is_zstd else cast(BinaryIO, gzip.open(file)) as stream:
                    yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream), 1 << 16))
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error


def _zstd(path: Path) -> BinaryIO:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path} is compressed by zstd, which needs pyarrow: pip install pyarrow"
        ) from error
    return cast(BinaryIO, pyarrow.CompressedInputStream(native_file(path), "zstd"))


def plain_name(path: Path) -> str:
    """The name of a file without what says that it is compressed, in lower case."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
