"""Rows that can be read only one after another, of a source whose length nobody knows.

A source of one's own gives a function that reads from a place on, and yields each row with the
place behind it:

    def read(place):                       # None: from the beginning
        …
            yield ids, place               # seq_len + 1 ids; numbers, texts, lists and tables

The row at a position is thereby the same whenever it is asked for: `InOrder` reads on to it, or
begins anew at the last place that it remembers before it. A checkpoint holds such a place.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch

from fp4train.data.stored import Ids
from fp4train.data.stream import Rows, Stream
from fp4train.data.token_array import TokenArray
from fp4train.data.tokens import NO_BORDERS, Borders, Tokenizer
from fp4train.errors import DataError, data_errors, reason

ReadRows = Callable[[Any], Iterator[tuple[Sequence[int] | Ids, Any]]]
"""The rows from a place on, each with the place behind it; of None, all rows."""
_REMEMBERED = 8
"""Places at the beginnings of batches that are kept."""


class InOrder(Stream):
    """The rows that a function reads. Each rank reads those of all ranks."""

    def __init__(
        self, read: ReadRows, *, vocab_size: int, name: str, batch_size: int, seq_len: int
    ) -> None:
        super().__init__(name=name, vocab_size=vocab_size, batch_size=batch_size, seq_len=seq_len)
        self.read = read
        self._places = {0: json.dumps(None)}
        """Position → the place of its row in JSON, which a resume reads as well; 0 stays, and the
        last ones.
        """
        self._reading = iter(read(None))
        self._position = 0
        self._alone = Lock()

    def rows(self, first: int, count: int) -> Rows:
        """See `Stream.rows`.

        Raises:
            DataError: there are fewer rows, or one has another length or ids that are not possible.
        """
        with self._alone:
            self._go_to(first)
            rows_BT1 = np.array([self._next() for _ in range(count)], dtype=np.int64)
        rows = torch.from_numpy(rows_BT1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state(self, position: int) -> Mapping[str, Any]:
        """See `Stream.state`: the last place that is remembered at or before `position`."""
        places = dict(self._places)
        at = max(at for at in places if at <= position)
        return {"position": at, "place": places[at]}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Stream.load`."""
        position = state["position"]
        if type(position) is not int or position < 0:
            raise ValueError(f"the place in the {self.name} data is at position {position!r}")
        json.loads(state["place"])
        self._remember(position, state["place"])

    def _remember(self, position: int, place: str) -> None:
        self._places.pop(position, None)
        self._places[position] = place
        for old in list(self._places)[:-_REMEMBERED]:
            if old:
                self._places.pop(old, None)

    def _go_to(self, position: int) -> None:
        """Read on to a position, from the nearest place before it."""
        nearest = self.state(position)
        if not nearest["position"] <= self._position <= position:
            self._reading = iter(self.read(json.loads(nearest["place"])))
            self._position = nearest["position"]
        while self._position < position:
            self._next()

    def _next(self) -> Ids:
        """The next row; the place at the beginning of each batch is remembered."""
        position = self._position
        what = f"row {position} of the {self.name} data"
        self._position = -1  # where this fails, reading begins anew
        with data_errors(OSError, before=f"{what} cannot be read: ", message=reason):
            row = next(self._reading, None)
        if row is None:
            raise DataError(f"{what} is asked for, and the data end before it")
        ids = np.asarray(row[0])
        if ids.shape != (self.seq_len + 1,) or ids.dtype.kind not in "iu":
            raise DataError(
                f"{what} is {ids.dtype} of shape {ids.shape}: a row has train.seq_len + 1 = "
                f"{self.seq_len + 1} whole numbers"
            )
        TokenArray(ids, self.vocab_size, self.name).check(ids, f"{what}: its tokens")
        self._position = position + 1
        if self._position % self.batch_size == 0:
            with data_errors(TypeError, before=f"{what}: the place behind it is kept in JSON: "):
                self._remember(self._position, json.dumps(row[1]))
        return ids


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """The data of a run whose training and validation rows are read in order.

    Args:
        vocab_size: ids that are possible.
        train, val: functions that read the rows.
        fingerprint: text that tells other data apart: a resume refuses another one.
        description: the data in words.
        tokenizer: tokenizer that wrote the ids, if it is known.
        borders: ids that divide documents, for `train.document_mask`.
    """

    vocab_size: int
    train: ReadRows
    val: ReadRows
    fingerprint: str
    description: str
    tokenizer: Tokenizer | None = None
    borders: Borders = NO_BORDERS

    def training(self, *, batch_size: int, seq_len: int, seed: int) -> Stream:
        """The rows of training, whose order is the reader's."""
        return self._stream(self.train, "train", batch_size, seq_len)

    def validation(self, *, batch_size: int, seq_len: int) -> Stream:
        """The rows of an evaluation, from the first on each time."""
        return self._stream(self.val, "val", batch_size, seq_len)

    def _stream(self, read: ReadRows, name: str, batch_size: int, seq_len: int) -> Stream:
        return InOrder(
            read, vocab_size=self.vocab_size, name=name, batch_size=batch_size, seq_len=seq_len
        )
