"""What is wrong with somebody's data, in one message that says what to do about it."""

from fp4train.errors import UserError


class DataError(UserError, ValueError):
    """Data, or a tokenizer, that cannot be read or does not fit the run."""
