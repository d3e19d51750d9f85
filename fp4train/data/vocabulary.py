"""How large a vocabulary a source will have, told from its configuration: a plan reads no data."""

import tempfile
from pathlib import Path

from fp4train.data.source import Source
from fp4train.data.tokenizers import BytePairs
from fp4train.errors import DataError


def planned_vocab_size(source: Source) -> int:
    """Token ids of `source`; of a tokenizer that is still to be trained, the most it may have."""
    size, tokenizer = getattr(source, "vocab_size", None), getattr(source, "tokenizer", None)
    if isinstance(size, int):
        return size
    if tokenizer is None:
        raise DataError(f"{type(source).__name__} has neither vocab_size nor tokenizer: the vocabulary is unknown")
    if isinstance(tokenizer, BytePairs):
        return tokenizer.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        return int(tokenizer.build(lambda: iter(()), Path(folder)).vocab_size)
