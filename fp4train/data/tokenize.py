"""Documents → packed token ids: every document's tokens, one end-of-document id, the next document.

Pieces are encoded 64 at a time, which is what keeps the threads of the `tokenizers` library busy.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from fp4train.data.documents import Piece
from fp4train.data.tokenizers import Tokenizer
from fp4train.data.tokens import ids_dtype

PIECES_AT_ONCE = 64


def token_chunks(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """The packed ids of `pieces` in order, some at a time, in the smallest type for the vocabulary."""
    dtype = ids_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    rest = iter(pieces)
    while batch := list(islice(rest, PIECES_AT_ONCE)):
        parts: list[npt.NDArray[np.integer[Any]]] = []
        for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            parts.append(ids.astype(dtype))
            if piece.ends_document:
                parts.append(end)
        yield np.concatenate(parts)


def tokenize_in_memory(pieces: Iterable[Piece], tokenizer: Tokenizer) -> npt.NDArray[np.integer[Any]]:
    """All packed ids of `pieces` as one array."""
    chunks = list(token_chunks(pieces, tokenizer))
    return np.concatenate(chunks) if chunks else np.empty(0, dtype=ids_dtype(tokenizer.vocab_size))
