"""Objects on a store, such as s3://bucket/a, as files: by fsspec, which has protocols and credentials.

Bytes are read by ranges, several in one call; fsspec repeats what fails for a while. An instance of a
store is not kept: after a fork it is another one.
"""

import errno
import io
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path, PosixPath
from typing import Any

from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.text import first_line

PIECE = 1 << 20
"""Bytes of a range, where an object is read from the first on."""
_IDENTITIES = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "created")
"""What stores say of an object that is another value after a change; the first counts."""


class StorePath(PosixPath):
    """A path on a store, for who opens a `Path`, or asks for its size and stamp.

    Raises:
        UserError: the store cannot be reached, or denies it.
        FileNotFoundError: there is no such object.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def resolve(self, *_: Any) -> "StorePath":
        return self

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """What the store says of it; asked once."""
        with _store(self) as (store, name):
            return store.info(name)  # type: ignore[no-any-return]

    @property
    def known_by(self) -> str:
        """What tells a change of the object, beside its size."""
        return next((name for name in _IDENTITIES if name in self.info), "name")

    def stat(self, **_: Any) -> os.stat_result:
        """Kind, size, and as inode what tells a change."""
        kind = stat.S_IFDIR if self.info["type"] == "directory" else stat.S_IFREG
        identity = zlib.crc32(f"{self.info.get(self.known_by)}".encode())
        return os.stat_result(
            (kind, identity, 0, 1, 0, 0, self.info["size"] or 0, 0, 0, 0),
            {"st_mtime_ns": 0, "st_ctime_ns": 0},
        )

    def open(self, mode: str = "rb") -> Any:  # type: ignore[override]
        """The object, to be read in binary."""
        return io.BufferedReader(_StoreFile(self), PIECE)

    def pieces(self) -> Iterator[bytes]:
        """The whole object, in large pieces."""
        return iter(partial(self.open().read, 64 * PIECE), b"")

    def put(self, folder: Folder, name: str) -> None:
        """Make the object of a file that may grow, and compare its size."""
        with (
            os.fdopen(folder.descriptor_of(name), "rb") as file,
            _store(self, "written") as (store, at),
        ):
            size = os.fstat(file.fileno()).st_size
            store.put_file(f"/proc/self/fd/{file.fileno()}", at)
            if (there := store.info(at)["size"]) < size:
                raise EOFError(f"{there:,} of {size:,} bytes are there")

    def delete(self) -> None:
        """Remove the object."""
        with _store(self, "removed") as (store, at):
            store.rm_file(at)

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
        starts = range(first, self.at, 8 * PIECE)
        ends = (*starts[1:], self.at)
        if starts:
            parts = read_ranges([(self.path, *part) for part in zip(starts, ends, strict=True)])
            buffer[: self.at - first] = b"".join(parts)
        return self.at - first


def read_ranges(ranges: Sequence[tuple[StorePath, int, int]]) -> list[bytes]:
    """The bytes of ranges, in one call; of ranges on stores of several kinds in one each.

    Args:
        ranges: object, its first byte, and the byte behind the last.
    """
    if len({path.parts[0] for path, _, _ in ranges}) != 1:
        return [read_ranges([part])[0] for part in ranges]
    paths, firsts, ends = map(list, zip(*ranges, strict=True))
    with _store(paths[0]) as (store, _):
        parts = store.cat_ranges([*map(str, paths)], firsts, ends, on_error="return")
        for (path, first, end), part in zip(ranges, parts, strict=True):
            if isinstance(part, Exception):
                raise part
            if len(part) != end - first:
                raise EOFError(f"{path} ends before byte {end:,}")
        return list(parts)


def native_file(path: Path) -> Any:
    """A file of pyarrow."""
    import pyarrow

    if isinstance(path, StorePath):
        return pyarrow.PythonFile(path.open())
    return pyarrow.OSFile(str(path))


_PATIENCE: Mapping[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": 10,
            "retries": {"total_max_attempts": 1},
        }
    }
}
"""Options by scheme: seconds after which a server that does not answer is asked again. s3fs asks five
times itself.
"""


@contextmanager
def _store(path: StorePath, done: str = "read") -> Iterator[tuple[Any, str]]:
    """The store of a path, and its name there."""
    try:
        from fsspec.core import url_to_fs

        options = _PATIENCE.get(str(path).partition(":")[0], {})
        yield url_to_fs(str(path), use_listings_cache=False, **options)
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "the store lacks it", str(path)) from error
    except Exception as error:  # each store has its own
        raise UserError(
            f"{path} cannot be {done}: {first_line(error)} ({type(error).__name__})"
        ) from error
