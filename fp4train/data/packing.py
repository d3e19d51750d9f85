"""Conversations → sequences of equal length.

Each conversation goes, in order, into the fullest of the last `OPEN` sequences that has room, and
none is divided. The rest of a sequence is filled with ends of documents. One that is longer than a
sequence loses its end.

The id that ends a document may also end each turn of a conversation (`</s>` of Llama 2, Mistral and
Zephyr), whose tokens attend to each other: which of these ids end no conversation is written down
beside them.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4train.data.tokens import Ids
from fp4train.errors import DataError

OPEN = 64
_log = logging.getLogger(__name__)


class Learned(NamedTuple):
    """The ids of a conversation, and of each whether it is learned."""

    ids: Ids
    scored: npt.NDArray[np.bool_]

    def ended(self, end: int) -> "Learned":
        """The conversation with the id that ends a document behind it, which is learned where its
        last answer is.
        """
        if len(self.ids) and self.ids[-1] == end:
            return self
        last = bool(len(self.scored)) and bool(self.scored[-1])
        return Learned(np.append(self.ids, end), np.append(self.scored, last))


def pack(
    conversations: Iterable[Learned], end: int, seq_len: int, dtype: np.dtype[Any]
) -> Iterator[Ids]:
    """The packed ids of all sequences, one more as the last target; then for each id whether it is
    scored; then for each whether it is the end of a document within a conversation.

    Args:
        end: the id that ends a document.

    Raises:
        DataError: no answer is left.
    """
    sequences: list[list[Ids]] = []
    room: dict[int, int] = {}
    cut = dropped = 0
    for conversation in conversations:
        ids, scored = conversation.ended(end)
        if len(ids) > seq_len:
            ids = ids[:seq_len]
            scored = scored[:seq_len]
            cut += 1
        if not scored.any():
            dropped += 1
            continue
        inner = ids == end
        inner[-1] = False
        fitting = [number for number, left in room.items() if left >= len(ids)]
        if fitting:
            number = min(fitting, key=lambda candidate: (room[candidate], candidate))
        else:
            number = len(sequences)
            room[number] = seq_len
            sequences.append([])
            if len(room) > OPEN:
                del room[min(room, key=lambda candidate: (room[candidate], candidate))]
        sequences[number].append(np.stack((ids, scored, inner)).astype(dtype))
        if number in room:
            room[number] -= len(ids)
    if cut or dropped:
        text = (
            "%d conversations are longer than train.seq_len=%d and lose their ends; %d with no "
            "answer left are dropped"
        )
        _log.warning(text, cut, seq_len, dropped)
    if not sequences:
        raise DataError(
            f"no answer that is to be learned lies within train.seq_len={seq_len} tokens: choose a "
            "larger one, or take keys such as weight=0 out of the messages"
        )
    packed = np.full(len(sequences) * seq_len + 1, end, dtype=dtype)
    answers = np.zeros_like(packed)
    inner_ends = np.zeros_like(packed)
    for number, parts in enumerate(sequences):
        filled = np.concatenate(parts, axis=1)
        place = slice(number * seq_len, number * seq_len + filled.shape[1])
        packed[place], answers[place], inner_ends[place] = filled
    yield packed
    yield answers
    yield inner_ends
