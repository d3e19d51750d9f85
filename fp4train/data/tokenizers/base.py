"""What a tokenizer is here: text to ids and back, and the id that ends a document."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fp4train.data.documents import Piece

Documents = Callable[[], Iterator[Piece]]


class Tokenizer(Protocol):
    """Text ↔ ids. `identity` differs for tokenizers that differ: a part of the key of tokenised data."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    @property
    def identity(self) -> str: ...
    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer[Any]]]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class TokenizerConfig(Protocol):
    """What `data.tokenizer` binds to."""

    def build(self, documents: Documents, run_dir: Path) -> Tokenizer:
        """The tokenizer; what must be kept for a resume is kept in `run_dir`."""
        ...


def check_tokenizer(tokenizer: object) -> None:
    """Refuse what is no tokenizer's configuration, such as the name that `data.tokenizer=NAME` leaves here."""
    if not hasattr(tokenizer, "build"):
        raise ValueError(
            f"data.tokenizer={tokenizer!r}: a kind of tokenizer is chosen with a slash, data/tokenizer=bytes, "
            "data/tokenizer=bpe, or data/tokenizer=pretrained data.tokenizer.name=FILE_OR_HUB_NAME"
        )
