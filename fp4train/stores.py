"""Objects on a store, such as s3://bucket/a, as files: by fsspec, which has protocols and credentials.

Bytes are read by ranges, several in one call, which is repeated after each of `PAUSES` where
fsspec's own attempts fail. An instance of a store is not kept: after a fork it is another one.
"""

import errno
import io
import os
import stat
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PosixPath
from typing import Any

from fp4train.errors import UserError
from fp4train.text import first_line

PIECE = 1 << 20
"""Bytes of a range, where an object is read from the first on."""
PAUSES = (1.0, 4.0, 16.0)
"""Seconds."""
_IDENTITIES = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "created")
"""What stores say of an object that is another value after a change; the first counts."""

Range = tuple["StorePath", int, int]
"""Object, first byte, and the byte behind the last."""


class StorePath(PosixPath):
    """A path on a store, for who opens a `Path`, or asks for its size and stamp.

    Raises:
        UserError: the store cannot be reached, or denies it.
        FileNotFoundError: there is no such object.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """What the store says of it; asked once."""
        with _store(self) as (store, name):
            return store.info(name)  # type: ignore[no-any-return]

    @property
    def known_by(self) -> str:
        """What tells a change of the object, beside its size."""
        return next((name for name in _IDENTITIES if self.info.get(name)), "name")

    def stat(self, **_: Any) -> os.stat_result:
        """Kind, size, and as inode what tells a change."""
        kind = stat.S_IFDIR if self.info["type"] == "directory" else stat.S_IFREG
        identity = zlib.crc32(str(self.info.get(self.known_by)).encode())
        values = (kind, identity, 0, 1, 0, 0, self.info["size"] or 0, 0, 0, 0)
        return os.stat_result(values, {"st_mtime_ns": 0, "st_ctime_ns": 0})

    def open(self, *_: Any, **__: Any) -> Any:
        """The object, to be read in binary."""
        return io.BufferedReader(_StoreFile(self), PIECE)

    def listed(self, how: str) -> "Iterator[StorePath]":
        """The objects that begin with this name and a slash ("find"), or that match it ("glob")."""
        with _store(self) as (store, name):
            for at, info in getattr(store, how)(name, detail=True).items():
                path = StorePath(store.unstrip_protocol(at))
                path.info = info
                yield path


class _StoreFile(io.RawIOBase):
    def __init__(self, path: StorePath) -> None:
        self.path = path
        self.at = 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.path.info["size"])[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        first = self.at
        self.at = min(first + len(buffer), self.path.info["size"])
        if size := self.at - first:
            (buffer[:size],) = read_ranges([(self.path, first, self.at)])
        return size


def read_ranges(ranges: Sequence[Range], pauses: Sequence[float] = PAUSES) -> list[bytes]:
    """The bytes of ranges on stores of one kind, in one call."""
    paths, firsts, ends = map(list, zip(*ranges, strict=True))
    try:
        with _store(paths[0]) as (store, _):
            parts = store.cat_ranges([*map(str, paths)], firsts, ends, on_error="return")
            for (path, first, end), part in zip(ranges, parts, strict=True):
                if isinstance(part, Exception):
                    raise part
                if len(part) != end - first:
                    raise EOFError(f"{path} ends before byte {end:,}")
            return list(parts)
    except UserError:
        if not pauses:
            raise
    time.sleep(pauses[0])
    return read_ranges(ranges, pauses[1:])


def native_file(path: Path) -> Any:
    """A file of pyarrow."""
    import pyarrow

    if isinstance(path, StorePath):
        return pyarrow.PythonFile(path.open())
    return pyarrow.OSFile(str(path))


@contextmanager
def _store(path: StorePath) -> Iterator[tuple[Any, str]]:
    """The store of a path, and its name there."""
    try:
        from fsspec.core import url_to_fs

        yield url_to_fs(str(path), use_listings_cache=False)
    except FileNotFoundError as error:
        text = "the store has no such object"
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from error
    except Exception as error:  # each store has its own
        kind = type(error).__name__
        raise UserError(f"{path} cannot be read: {first_line(error)} ({kind})") from error
