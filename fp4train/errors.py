"""Errors that are the user's to act on: the command line prints them in one line, without a traceback."""


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where, and what to do about it."""
