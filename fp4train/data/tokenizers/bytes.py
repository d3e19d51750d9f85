"""Bytes: the ids 0 … 255 are those of UTF-8, and 256 ends a document. Nothing to train, nothing to
download.

The vocabulary has 257 ids; the model rounds its embedding up to whatever its head's blocks like.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fp4train.data.encoding import Encoded
from fp4train.data.tokens import Documents, Ids


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """`data/tokenizer=bytes`: its own tokenizer, as there is nothing to build."""

    concatenates: ClassVar[bool] = True
    """The ids of two texts, one after the other, are those of both together."""

    def build(self, documents: Documents, run_dir: Path) -> "Bytes":
        return self

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def end_of_document(self) -> int:
        return 256

    @property
    def end(self) -> str:
        """The token that ends a document, as files of tokenizers spell it."""
        return "<|end|>"

    def to_json(self) -> str:
        """A file of the `tokenizers` library with equal ids: byte pairs without merges."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        # GPT-2 spells a byte by a character that shows
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = sorted(set(range(256)) - set(shown))
        vocabulary = {chr(byte): byte for byte in shown} | {
            chr(256 + n): byte for n, byte in enumerate(hidden)
        }
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(self.end, special=True)])
        text: str = tokenizer.to_str()
        return text

    @property
    def identity(self) -> str:
        return "bytes"

    def token_bytes(self) -> Ids:
        return np.array([1] * 256 + [0], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_markup(self, text: str) -> Encoded:
        """The bytes, with the character that each belongs to."""
        ids = np.frombuffer(text.encode(), dtype=np.uint8)
        characters = np.cumsum((ids & 0xC0) != 0x80) - 1
        return Encoded(ids, characters, characters + 1, np.ones(len(ids), dtype=np.bool_))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
