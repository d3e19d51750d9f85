"""Errors that the user can correct: the command line prints them on one line, without a traceback."""


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
