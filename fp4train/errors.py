"""Errors that the user can correct: the command line prints them on one line, without a traceback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class UserError(Exception):
    """An error in input or environment; the message says what is wrong, where, and what to do."""

    exit_code = 1
    """Exit code of a command that ends with this error."""


class DataError(UserError, ValueError):
    """Data, or a tokenizer, that cannot be read or does not fit the run."""


class LostError(UserError):
    """A GPU, a rank or a connection failed, not the run: the same command may go on from the last checkpoint.

    Args:
        speaks: whether this rank is the one that says so.
    """

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: launchers start the run again."""

    def __init__(self, text: str, *, speaks: bool = True) -> None:
        super().__init__(text)
        self.speaks = speaks


def reason(error: Exception) -> str:
    """Message of an error of the operating system, without its number and the file's name."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def user_errors(
    *kinds: type[Exception],
    before: str = "",
    after: str = "",
    message: Callable[[Any], object] = str,
    raised: type[UserError] = UserError,
) -> Iterator[None]:
    """A context whose errors of these kinds are the user's to correct.

    Args:
        message: the part of the error that is said.

    Raises:
        UserError: that, between `before` and `after`; or another class of them, `raised`.
    """
    try:
        yield
    except kinds as error:
        raise raised(f"{before}{message(error)}{after}") from error


data_errors = partial(user_errors, raised=DataError)
"""`user_errors` of data and tokenizers."""
