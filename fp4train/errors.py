"""Errors that the user can correct: the command line prints them on one line, without a traceback."""


class UserError(Exception):
    """An error in input or environment; the message says what is wrong, where, and what to do."""


class DataError(UserError, ValueError):
    """Data, or a tokenizer, that cannot be read or does not fit the run."""
