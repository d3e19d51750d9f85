"""Token ids in files, read where they are asked for; memory holds what is asked for alone.

Files are read at a place (`pread`), not mapped: one that is cut off while a run trains is an error
with a message, where a mapped one ends the process by a signal. What is read is compared with what
the file was when it was opened:

| file | compared |
|---|---|
| a shard of the token cache | the CRC-32 of each `BLOCK` that is read, with that of when it was written |
| a token file of the user's | its stamp after each read; where it differs, the digest of all of it |
| a token file on a store | nothing: each start compares its identity (`stores.py`) |
"""

import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from fp4train.errors import DataError, UserError, data_errors
from fp4train.stores import StorePath, read_ranges

Ids = npt.NDArray[np.integer[Any]]
Places = npt.NDArray[np.int64]

BLOCK = 1 << 12
"""Bytes of each checksum: a row of a batch is read in whole blocks."""
OPEN = 16
"""Most shards of one entry that stay open: a process can have few files open."""
AHEAD = 4
"""Batches that are fetched before they are asked for, where a store may answer late."""
SUSPECT = ".bad"
"""Suffix of the mark beside a shard that was found damaged while a run read it."""


@dataclass(eq=False)
class IdFile:
    """Ids of one type, one after another, in an open file.

    Args:
        descriptor: descriptor of the open file; owned from here on.
        path: its path, for messages.
        dtype: type of the ids.
        count: number of ids.
        offset: bytes before the first id.
        untyped: whether the user says the type of the ids, which the file itself does not.
    """

    descriptor: int
    path: Path
    dtype: np.dtype[Any]
    count: int
    offset: int = 0
    untyped: bool = False

    def __post_init__(self) -> None:
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def let_go(self) -> None:
        """Close the file: each read opens it anew, as a process can have few files open."""
        self._close()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self._close.alive:
            yield self.descriptor
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @property
    def size(self) -> int:
        """Bytes of all ids."""
        return self.count * self.dtype.itemsize

    def read(self, first: int, count: int) -> Ids:
        """`count` ids from `first` on.

        Raises:
            DataError: the file is not as it was.
        """
        width = self.dtype.itemsize
        return np.frombuffer(self.checked(first * width, count * width), self.dtype)

    def checked(self, first: int, size: int) -> bytes:
        """`raw`, compared with what the file was.

        Raises:
            DataError: the file is not as it was.
        """
        return self.raw(first, size)

    def raw(self, first: int, size: int) -> bytes:
        """`size` bytes of the ids from byte `first` on.

        Raises:
            DataError: the file is shorter than it was, or cannot be read.
        """
        parts: list[bytes] = []
        missing = size
        while missing:
            place = self.offset + first + size - missing
            try:
                with self._opened() as descriptor:
                    part = os.pread(descriptor, missing, place)
            except OSError as error:
                raise DataError(f"{self.path} cannot be read any more: {error.strerror}") from error
            if not part:
                raise DataError(
                    f"{self.path} was cut off after the run had opened it: {missing:,} bytes "
                    "are missing"
                )
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(eq=False)
class CheckedFile(IdFile):
    """A shard of the cache, of which every block that is read is compared with its checksum.

    Args:
        sums: file of the checksums.
    """

    sums: IdFile | None = None

    def checked(self, first: int, size: int) -> bytes:
        if not size:
            return b""
        assert self.sums is not None
        begin = first // BLOCK
        end = -(-(first + size) // BLOCK)
        try:
            data = self.raw(begin * BLOCK, min(end * BLOCK, self.size) - begin * BLOCK)
            if not np.array_equal(checksums(data), self.sums.read(begin, end - begin)):
                raise DataError(
                    f"{self.path} was changed after it was written: bytes {begin * BLOCK:,} to "
                    f"{end * BLOCK:,} are not the text of this run"
                )
        except DataError as error:
            cure = "Start the command again: this part is tokenised anew"
            try:
                self.path.with_suffix(SUSPECT).touch()
            except OSError:
                cure = "It is another user's: have it removed, or choose another data.cache_dir"
            raise DataError(f"{error}. {cure}") from error
        offset = first - begin * BLOCK
        if len(data) == size:
            return data
        return bytes(memoryview(data)[offset : offset + size])


def checksums(data: bytes | memoryview) -> npt.NDArray[np.uint32]:
    """The CRC-32 of each block of `data`."""
    view = memoryview(data)
    return np.array(
        [zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)], np.uint32
    )


Stamp = tuple[int, int, int, int]


def stamp_of(status: os.stat_result) -> Stamp:
    """Size, time of the last write, inode and time of any change of a file: another file, or other
    bytes whose time was set back, have another one.
    """
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


@dataclass(eq=False)
class WatchedFile(IdFile):
    """A token file of the user's.

    `digest` is that of all its ids, and `anew` computes it: it is compared where the file was
    touched while a run reads it.
    """

    digest: str | None = None
    anew: Callable[[IdFile], str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stamp = self._stamp()

    def _stamp(self) -> Stamp:
        return stamp_of(os.stat(self.descriptor if self._close.alive else self.path))

    def checked(self, first: int, size: int) -> bytes:
        data = self.raw(first, size)
        stamp = self._stamp()
        if stamp != self.stamp and self.anew is not None:
            if stamp[0] != self.stamp[0] or self.anew(self) != self.digest:
                raise DataError(
                    f"{self.path} was changed after the run had opened it. Put it back as it "
                    "was and start the command again, or begin a new run with what it holds now"
                )
            self.stamp = stamp
        return data


class StoreFile(IdFile):
    """A token file on a store."""

    def __init__(self, path: StorePath) -> None:
        self.path: StorePath = path
        self.dtype = np.dtype(np.uint8)
        self.stamp = stamp_of(path.stat())

    def let_go(self) -> None:
        """Nothing is open."""

    def raw(self, first: int, size: int) -> bytes:
        start = self.offset + first
        return read_ranges([(self.path, start, start + size)])[0]


IdFileKind = TypeVar("IdFileKind", bound=IdFile, covariant=True)


class StoredIds(Generic[IdFileKind]):
    """The ids of several files, one after another, or a stretch of them; used like an array that
    cannot be changed.

    A slice is another one. `np.asarray` reads all of it, `take` what lies at some places.
    """

    def __init__(self, files: Sequence[IdFileKind]) -> None:
        self.files = tuple(files)
        self._starts = np.cumsum([0, *(file.count for file in self.files)])
        self._first = 0
        self._end = int(self._starts[-1])
        dtypes = {file.dtype for file in self.files}
        self.dtype: np.dtype[Any] = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)

    @property
    def filename(self) -> str:
        """The file, or the first of several."""
        return str(self.files[0].path)

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, part: int) -> np.integer[Any]: ...
    @overload
    def __getitem__(self, part: slice) -> "StoredIds[IdFileKind]": ...
    def __getitem__(self, part: int | slice) -> "StoredIds[IdFileKind] | np.integer[Any]":
        if not isinstance(part, slice):
            return np.int64(self.take(np.array([part + len(self) if part < 0 else part]))[0])
        begin, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a step of {step}: stored ids are cut in stretches")
        stretch = copy(self)
        stretch._first = self._first + begin
        stretch._end = self._first + max(begin, end)
        return stretch

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Ids:
        ids = self.take(np.arange(len(self)))
        return ids if dtype is None else ids.astype(dtype)

    def tolist(self) -> list[int]:
        """All of it as numbers of Python."""
        numbers: list[int] = np.asarray(self).tolist()
        return numbers

    def take(self, places: Places) -> Ids:
        """The ids at `places`, of any shape. A stretch of places that follow each other is read at
        once, and so is what lies between all places where that is less than they are.
        """
        flat = np.asarray(places, np.int64).ravel()
        if not len(flat):
            return np.empty(np.shape(places), self.dtype)
        first = int(flat.min())
        end = int(flat.max()) + 1
        if not 0 <= first < end <= len(self):
            raise IndexError(f"ids {first} to {end} of {len(self)}")
        if end - first < len(flat):
            return self.take(np.arange(first, end))[flat - first].reshape(np.shape(places))
        flat = flat + self._first
        numbers = np.searchsorted(self._starts, flat, side="right") - 1
        begins = np.flatnonzero(np.diff(flat + numbers, prepend=-9) != 1)  # or another file
        counts = np.diff(begins, append=len(flat)).tolist()
        firsts = (flat - self._starts[numbers])[begins].tolist()
        ids = np.empty(len(flat), self.dtype)
        at = 0
        for part in self._read([*zip(numbers[begins].tolist(), firsts, counts, strict=True)]):
            ids[at : at + len(part)] = part
            at += len(part)
        return ids.reshape(np.shape(places))

    def _read(self, pieces: Sequence[tuple[int, int, int]]) -> Iterator[Ids]:
        """The ids of pieces: (number of the file, first of its ids, ids)."""
        for number, first, count in pieces:
            yield self.file(number).read(first, count)

    def file(self, number: int) -> IdFileKind:
        """The file of this number among all."""
        return self.files[number]


class RemoteIds(StoredIds[StoreFile]):
    """The ids of files on stores: all pieces are read in one call."""

    ahead = AHEAD

    def _read(self, pieces: Sequence[tuple[int, int, int]]) -> Iterator[Ids]:
        files = [self.files[number] for number, _, _ in pieces]
        ranges = []
        for file, (_, first, count) in zip(files, pieces, strict=True):
            start = file.offset + first * file.dtype.itemsize
            ranges.append((file.path, start, start + count * file.dtype.itemsize))
        with data_errors(OSError, UserError):
            return map(np.frombuffer, read_ranges(ranges), [file.dtype for file in files])


class ShardedIds(StoredIds[CheckedFile]):
    """The ids of an entry of the cache: its shards are opened where they are read, so that memory
    holds their lengths alone.

    Args:
        path: the entry.
        counts: ids of each shard.
        open_shard: function that opens one by its number.
        tokens: ids in all; None: those of all shards.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        counts: Sequence[int],
        open_shard: Callable[[int], CheckedFile],
        tokens: int | None = None,
    ) -> None:
        super().__init__(())
        self.path = path
        self.dtype = dtype
        self.counts = counts
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        self._end = int(self._starts[-1]) if tokens is None else tokens
        self._open_shard = lru_cache(OPEN)(open_shard)

    @property
    def filename(self) -> str:
        return str(self.path)

    def file(self, number: int) -> CheckedFile:
        """Shard `number`, opened anew where it is not among the last ones."""
        return self._open_shard(number)


class _Stretch(IdFile):
    """Ids in memory, or a stretch of stored ones, read as a file is."""

    def __init__(self, ids: "TokenIds") -> None:
        self.ids = ids
        self.path = Path(getattr(ids, "filename", "memory"))
        self.dtype = ids.dtype
        self.count = len(ids)
        self.untyped = untyped(ids)

    def read(self, first: int, count: int) -> Ids:
        return np.asarray(self.ids[first : first + count])


class _JoinedIds(StoredIds[_Stretch]):
    """The ids of several arrays; what is taken is asked of each array once."""

    ahead = AHEAD

    def take(self, places: Places) -> Ids:
        at = np.asarray(places) + self._first
        ids = np.empty(at.shape, self.dtype)
        for first, stretch in zip(self._starts, self.files, strict=False):
            inside = (first <= at) & (at < first + stretch.count)
            ids[inside] = stretch.ids.take(at[inside] - first)
        return ids


def joined(arrays: Sequence["TokenIds"]) -> StoredIds[IdFile]:
    """The ids of several arrays, one after another; none is copied."""
    return _JoinedIds([_Stretch(ids) for ids in arrays])


def untyped(ids: "TokenIds") -> bool:
    """Whether a file of the ids does not say their type itself."""
    return isinstance(ids, StoredIds) and any(file.untyped for file in ids.files)


TokenIds = Ids | StoredIds[IdFile]
"""Ids in memory or in files."""
