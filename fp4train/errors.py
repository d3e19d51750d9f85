"""Errors that the user can correct: the command line prints them on one line, without a
traceback.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

LAST_READER = "2144e3d1 (November 26, 2026)"
"""The last commit that reads files of all older forms."""

LAST_WITH_OLDER_RECIPES = "50266320 (November 28, 2026)"
"""The last commit that takes recipes that this one refuses: MS-EDEN under signs that stay, delayed
scaling of a transformed tensor, two kinds of history of one tensor.
"""


_STORAGE = "([a-z][a-z0-9+.-]+):/"
_SCHEME = re.compile(f"^{_STORAGE}|/{_STORAGE}/", re.IGNORECASE)
"""The beginning of a path in another storage, such as s3://bucket, of which `Path` leaves one
slash, alone or behind a folder of this machine.
"""

NEW_RUN = "begin a new run (another run.name, or run.overwrite=true)"
OTHER_RECIPE = (
    "give phases=none or policy=NAME with resume=RUN, or begin a new run with its weights: init=RUN "
    "run.name=NAME recipe=NAME"
)


class UserError(Exception):
    """An error in input or environment; the message says what is wrong, where, and what to do."""

    exit_code = 1
    """Exit code of a command that ends with this error."""


class DataError(UserError, ValueError):
    """Data, or a tokenizer, that cannot be read or does not fit the run."""


def check_local(path: object, key: str = "", *, stores: bool = False) -> None:
    """Refuse a path that lies in another storage than the files of this machine.

    Args:
        key: key that names it; empty: it stands alone.
        stores: whether it may lie on a store that fsspec knows.
    """
    if match := _SCHEME.search(str(path)):
        scheme = match[1] or match[2]
        places = "files of this machine"
        if stores:
            from fsspec import available_protocols

            if match[1] in available_protocols():
                return
            places += " and of stores that fsspec knows (s3, gs, hf, …)"
        raise DataError(
            f"{f'{key}={path}' if key else path}: {scheme}:// is no path here, where only "
            f"{places} are read and written: copy it to a disk, or mount it, and give that path"
        )


class OlderForm(UserError):
    """A file of a form that an older fp4train wrote and this one does not read.

    Args:
        path: the file.
        difference: predicate that says how its form differs from that of today: "has …".
        cure: advice on what else one can do.
        commit: the last one that reads it.
    """

    def __init__(
        self, path: Path, difference: str, cure: str = NEW_RUN, commit: str = LAST_READER
    ) -> None:
        self.difference = difference
        super().__init__(
            f"{path} is of an older fp4train: it {difference}, which this one does not read. "
            f"Go on with the commit {commit}, the last that reads it, or {cure}"
        )


class LostError(UserError):
    """A GPU, a rank or a connection failed, not the run: the same command may go on from the last
    checkpoint.

    Args:
        speaks: whether this rank is the one that says so.
    """

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: launchers start the run again."""

    def __init__(self, text: str, *, speaks: bool = True) -> None:
        super().__init__(text)
        self.speaks = speaks


def named(error: BaseException) -> str:
    """The class of an error that nobody expects, and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def reason(error: Exception) -> str:
    """Message of an error of the operating system, without its number and the file's name."""
    return str(getattr(_cured(error), "strerror", None) or error)


def in_words(error: BaseException, before: str = "") -> str:
    """Message of an error; of the operating system without its number, and with the file's name
    where `before` does not say it.
    """
    error = _cured(error)
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    name = error.filename
    if name is None or str(name) in before:
        return error.strerror
    return f"{name}: {error.strerror}"


def with_cure(error: OSError, path: Path, denied: Path | None = None) -> OSError:
    """An error of the same class about the file or folder `path`, with what to do.

    Args:
        denied: file or folder that lacks the permission, such as the folder where a name is made
            or removed; None: `path`, or the folder that it lies in where that is closed.
    """
    text = error.strerror
    if isinstance(error, PermissionError):
        text = _denied(path if denied is None else denied) or text
    elif isinstance(error, NotADirectoryError):
        text = "it, or what it lies in, is a file, not a folder: remove that, or use another name"
    elif isinstance(error, FileNotFoundError) and path.is_symlink():
        text = "it is a link that leads nowhere: remove it"
    elif error.errno == errno.ELOOP:
        text = "it is a link that leads to itself: remove it"
    return type(error)(error.errno, text, str(path))


def _cured(error: E) -> E | OSError:
    """The error; one of permissions as the system says it, with what to do."""
    if (
        isinstance(error, PermissionError)
        and isinstance(error.filename, str)
        and error.strerror == os.strerror(error.errno or 0)
    ):
        return with_cure(error, Path(error.filename))
    return error


def _denied(path: Path) -> str:
    """What denies access to `path`, and what allows it; empty where that cannot be told."""
    for place in (path, *path.parents):
        try:
            status = os.stat(place)
        except OSError:  # there is no such thing, or the folder that it lies in is closed
            continue
        if stat.S_ISDIR(status.st_mode):
            rights = "rwx"
            needed = os.R_OK | os.W_OK | os.X_OK
        else:
            rights = "rw"
            needed = os.R_OK | os.W_OK
        if os.access(place, needed, effective_ids=True):
            break
        if status.st_uid == os.geteuid():
            return f"permission denied: allow it with chmod u+{rights} {place}"
        return f"permission denied: {place} belongs to another user, who can allow it"
    return ""


@contextmanager
def user_errors(
    *kinds: type[Exception],
    before: str = "",
    after: str = "",
    message: Callable[[Any], object] | None = None,
    raised: type[UserError] = UserError,
) -> Iterator[None]:
    """A context whose errors of these kinds are the user's to correct.

    Args:
        kinds: classes of the errors.
        before, after: texts around the error's message.
        message: function from the error to its message; None: `in_words`.
        raised: class of the error that is raised in its place.

    Raises:
        UserError: the message, between `before` and `after`; of the class `raised`.
    """
    try:
        yield
    except kinds as error:
        text = in_words(error, before) if message is None else message(error)
        raise raised(f"{before}{text}{after}") from error


data_errors = partial(user_errors, raised=DataError)
"""`user_errors` of data and tokenizers."""


class OtherRunError(UserError):
    """A command names the directory of a run of another configuration."""
