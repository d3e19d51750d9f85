"""Files in directories that other people may have prepared: the one module that touches a run
directory.

A run directory may come from a download, a shared disk or another user. So everything in it is
reached relative to the descriptor of its open directory, and no name in it leads elsewhere:

- links are not followed, neither to files nor to folders (``O_NOFOLLOW``); the directory itself may
  be a link, because the user named it;
- only regular files are opened, checked on the open descriptor: a pipe or a device would block or
  act;
- what is read is bounded, and takes no more memory than it has bytes: a huge file costs an error;
- what is written appears whole under its name or not at all: a new file of an unguessable name,
  synced, then renamed.

Every function raises OSError (`NotPlain` where a thing is of the wrong kind), whose message names
the path.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from fp4train.errors import check_local, with_cure

Buffer: TypeAlias = "bytes | bytearray | memoryview"

PIECE = 1 << 20
"""Bytes that are read at a time from files that may be large."""
LINE = 1 << 24
"""Bytes of the longest line that is read."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_STALE_SECONDS = 60.0
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotPlain(OSError):
    """A link, a pipe, a device, or a folder where a file should be: what a run directory never
    holds.
    """


class Folder:
    """An open directory. A context manager; `close` it otherwise. One that nobody holds any more,
    such as that of a run that is over, is closed too.

    Args:
        path: its path, for messages.
        descriptor: descriptor of the open directory; owned from here on.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # threads may write to it until the process ends

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Folder:
        """The folder at a path that the user named: the path may lead over links. `create` makes
        missing ones.
        """
        path = Path(path)
        check_local(path)
        try:
            if create:
                _make(path)
            return cls(path, os.open(path, _FOLDER))
        except OSError as error:
            raise with_cure(error, path) from None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self.descriptor = -1
        self._close()

    # -- what is there -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        """All names in it, sorted. They are read by a descriptor that no forked process has: it has a
        place in the directory, and one that is killed would leave it in the middle.
        """
        try:
            descriptor = os.open(".", _FOLDER, dir_fd=self.descriptor)
            try:
                return sorted(os.listdir(descriptor))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise with_cure(error, self.path) from None

    def status(self, name: str) -> os.stat_result | None:
        """Status of the entry itself, which may be a link; None if there is none."""
        try:
            return os.stat(_checked(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._explained(name, error, "a file") from None

    def has_file(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def has_folder(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def kind(self, name: str) -> str:
        """The kind of an entry in words: "a pipe"; empty if there is none."""
        status = self.status(name)
        return "" if status is None else _kind(status)

    def folder(self, name: str, *, create: bool = False) -> Folder:
        """A folder in it; never one that a link leads to. `create` makes a missing one, durably."""
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(_checked(name), dir_fd=self.descriptor)
                    self.sync()
            return Folder(
                self.path / name,
                os.open(_checked(name), _FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor),
            )
        except OSError as error:
            raise self._explained(name, error, "a folder") from None

    # -- files -------------------------------------------------------------------------------------

    def descriptor_of(self, name: str, flags: int = os.O_RDONLY, *, mode: int = 0o644) -> int:
        """An open descriptor of the regular file `name`."""
        try:
            descriptor = os.open(_checked(name), flags | _SAFE, mode, dir_fd=self.descriptor)
        except OSError as error:
            raise self._explained(name, error, "a file") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise self._strange(name, "a file")
            os.set_blocking(descriptor, True)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, limit: int) -> bytes:
        """The whole file `name`, which may hold up to `limit` bytes."""
        with os.fdopen(self.descriptor_of(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, limit) + 1)  # what is asked for is allocated
        self._bound(name, max(size, len(data)), limit)
        return data

    def pieces(self, name: str, limit: int) -> Iterator[bytes]:
        """The whole file `name`, which may hold up to `limit` bytes, `PIECE` bytes at a time."""
        done = 0
        with os.fdopen(self.descriptor_of(name), "rb") as file:
            self._bound(name, os.fstat(file.fileno()).st_size, limit)
            while piece := file.read(PIECE):
                done += len(piece)
                self._bound(name, done, limit)
                yield piece

    def lines(self, name: str, limit: int) -> Iterator[bytes]:
        """The lines of the file `name`, which may hold up to `limit` bytes, each with its newline.

        The last one may have none: a kill has torn it, or it is longer than `LINE` and cut there.
        """
        unfinished = b""
        for piece in self.pieces(name, limit):
            head, *following = piece.split(b"\n")
            unfinished += head
            for line in following:
                yield unfinished + b"\n"
                unfinished = line
            if len(unfinished) >= LINE:
                break
        if unfinished:
            yield unfinished

    def write(self, name: str, data: Buffer | Iterable[Buffer], *, sync: bool = True) -> None:
        """Put `data`, or its pieces, under `name`, replacing a file (or a link itself) that is
        there.
        """
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            descriptor = self.descriptor_of(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                if isinstance(data, bytes | bytearray | memoryview):
                    write_all(descriptor, data)
                else:
                    for piece in data:
                        write_all(descriptor, piece)
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            status = self.status(name)
            if status is not None and stat.S_ISDIR(status.st_mode):
                raise self._strange(name, "a file")
            self.rename(temporary, name)
            if sync:
                self.sync()
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise

    def sync(self) -> None:
        """Make the names in it durable."""
        os.fsync(self.descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a thing in it another name; a file of that name is replaced."""
        names = _checked(old), _checked(new)
        try:
            os.rename(*names, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError as error:
            raise with_cure(error, self.path / new, self.path) from None

    def remove(self, name: str) -> None:
        """Remove a file, link or pipe; a missing one is no error."""
        try:
            os.unlink(_checked(name), dir_fd=self.descriptor)
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise with_cure(error, self.path / name, self.path) from None
        except OSError as error:
            raise self._explained(name, error, "a file") from None

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all that is in it, links themselves and never where they lead;
        missing is no error.
        """
        status = self.status(name)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise self._strange(name, "a folder")
        with self.folder(name) as inner:
            for entry in inner.names():
                inner.remove_all(entry)
        self.remove_empty(name)

    def remove_all(self, name: str) -> None:
        """Remove what has the name: a folder with all that is in it, or a thing of any other
        kind.
        """
        if self.has_folder(name):
            self.remove_folder(name)
        else:
            self.remove(name)

    def remove_empty(self, name: str) -> None:
        """Remove a folder that holds nothing; one that does is an error."""
        try:
            os.rmdir(_checked(name), dir_fd=self.descriptor)
        except OSError as error:
            raise with_cure(error, self.path / name, self.path) from None

    def remove_litter(self) -> None:
        """Remove temporary files that killed processes left; one that may still be written is
        younger than that.
        """
        for name in self.names():
            if not _TEMPORARY.fullmatch(name):
                continue
            status = self.status(name)
            if status is None or not stat.S_ISREG(status.st_mode):
                continue
            if time.time() - status.st_mtime > _STALE_SECONDS:
                self.remove(name)

    # -- errors ------------------------------------------------------------------------------------

    def _bound(self, name: str, size: int, limit: int) -> None:
        if size > limit:
            raise OSError(
                errno.EFBIG, f"{size:,} bytes; more than {limit:,} are not read", self._at(name)
            )

    def _at(self, name: str) -> str:
        return str(self.path / name)

    def _explained(self, name: str, error: OSError, expected: str) -> OSError:
        """The error about an entry in words: of what kind it is, or who may use it."""
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            return self._strange(name, expected)
        return with_cure(error, self.path / name)

    def _strange(self, name: str, expected: str) -> NotPlain:
        kind = self.kind(name)
        if kind == "a link":
            and_links = ", and links are not followed here"
        else:
            and_links = ""
        noun = expected.removeprefix("a ")
        text = f"it is {kind}, not {expected}{and_links}: remove it, or put the {noun} itself back"
        return NotPlain(errno.EINVAL, text, self._at(name))


def _kind(status: os.stat_result) -> str:
    """The kind of a thing in words."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFLNK: "a link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")


def _checked(name: str) -> str:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise OSError(errno.EINVAL, "not a name in a folder", name)
    return name


def _make(path: Path) -> None:
    """Make a folder and those above it that are missing, each durable under its name."""
    if not path.is_dir():
        if path.parent != path:
            _make(path.parent)
        with suppress(FileExistsError):
            path.mkdir()
        with Folder.open(path.parent) as above:
            above.sync()


def write_all(descriptor: int, data: Buffer) -> None:
    """Write all of `data`: a nearly full disk takes a part first, and then refuses."""
    unwritten = memoryview(data).cast("B")
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]


@contextmanager
def parent(path: Path, *, create: bool = False) -> Iterator[tuple[Folder, str]]:
    """The open folder that `path` lies in, and its name there."""
    path = Path(path)
    with Folder.open(path.parent, create=create) as folder:
        yield folder, path.name


@contextmanager
def new_folder(path: Path) -> Iterator[Folder]:
    """A new folder to fill, which gets the name `path` when the block has ended: whole, or not at
    all.

    It is filled under a hidden name beside `path`. An exception removes it; what a killed process
    left is removed by the next call for the same `path`.

    Raises:
        FileExistsError: something has the name already.
    """
    with parent(path, create=True) as (above, name):
        _remove_unfinished(above, name)
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        current = temporary
        _refuse_existing(above, name)
        os.mkdir(temporary, dir_fd=above.descriptor)
        try:
            with above.folder(temporary) as folder:
                with suppress(OSError):  # where folders cannot be locked, leftovers stay
                    fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
                folder.sync()
                _refuse_existing(above, name)
                above.rename(temporary, name)
                current = name
            above.sync()
        except BaseException:
            with suppress(OSError):
                above.remove_folder(current)
            raise


def _refuse_existing(folder: Folder, name: str) -> None:
    if folder.status(name) is not None:
        raise FileExistsError(
            errno.EEXIST, "something of this name is there already", str(folder.path / name)
        )


def _remove_unfinished(above: Folder, name: str) -> None:
    """Remove what killed processes left of a new folder; one that is being filled is locked."""
    for entry in above.names():
        if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp", entry) and above.has_folder(
            entry
        ):
            with suppress(OSError), above.folder(entry) as folder:
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                above.remove_folder(entry)


def read(path: Path, limit: int) -> bytes:
    """The whole of a file that may hold up to `limit` bytes; `path` itself must not be a link."""
    with parent(path) as (folder, name):
        return folder.read(name, limit)


def write(path: Path, data: Buffer, *, create: bool = False, sync: bool = True) -> None:
    """Write a file whole or not at all; `create` makes the folder that it lies in."""
    with parent(path, create=create) as (folder, name):
        folder.write(name, data, sync=sync)
