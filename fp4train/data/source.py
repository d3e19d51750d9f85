"""What `data=…` binds to. A new source is one file with a class like this, and one YAML in `configs/data`."""

from pathlib import Path
from typing import Protocol

from fp4train.data.tokens import TokenData


class Source(Protocol):
    """The configuration of a source of data.

    `fp4train plan`, which reads no data, takes the size of the vocabulary from a field `vocab_size` or, where there is
    none, from the field `tokenizer`.
    """

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        """Tokens for a run with sequences of `seq_len`, or a DataError that says what to do."""
        ...
