"""Bytes: the ids 0 … 255 are those of UTF-8, and 256 ends a document. Nothing to train, nothing to download.

The vocabulary has 257 ids; the model rounds its embedding up to whatever its head's blocks like.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp4train.data.tokens import Documents, Ids


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """`data/tokenizer=bytes`: its own tokenizer, as there is nothing to build."""

    def build(self, documents: Documents, run_dir: Path) -> "Bytes":
        return self

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def end_of_document(self) -> int:
        return 256

    @property
    def identity(self) -> str:
        return "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
