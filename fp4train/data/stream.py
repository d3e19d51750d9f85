"""What a run reads its rows from: rows by their positions in the run.

Who trains asks for the rows of a position, whatever was asked for before: ranks, microbatches, what
is fetched in advance, resumes, and a run that goes back to a checkpoint need nothing else. `Loader`
knows where the row of every position lies; `InOrder` reads rows one after another, and keeps a
place to go on from in the run's checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Rows = tuple[Tensor, Tensor]
"""Inputs and targets."""
IGNORED = -100
"""A target without a loss, torch's value for one."""
ENDLESS = 1 << 62
"""Rows of a stream whose length nobody knows."""


def shown_passes(times: float) -> str:
    """A number of passes in few digits."""
    return f"{times:.2g}" if times < 10 else f"{times:,.0f}"


class Stream(ABC):
    """The rows of a source, each of `seq_len` tokens.

    Args:
        name: name of the tokens in errors.
        vocab_size: ids that are possible.
    """

    all_scored = True
    """Whether every target counts in the loss."""
    ahead = 1
    """Batches that are fetched before they are asked for."""

    def __init__(self, *, name: str, vocab_size: int, batch_size: int, seq_len: int) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.seq_len = seq_len

    @property
    def fresh(self) -> int:
        """Rows before any is shown again."""
        return ENDLESS

    @abstractmethod
    def rows(self, first: int, count: int) -> Rows:
        """Inputs and targets, int64 [count, T] each, of positions first … first+count-1 of the
        run: the same whenever they are asked for.
        """

    def state(self, position: int) -> Mapping[str, Any] | None:
        """What a resume from `position` needs to have the same rows: numbers, texts, lists and
        tables of them. None: nothing is kept.
        """
        return None

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave.

        Raises:
            ValueError: it is nothing that it gives.
        """
        raise ValueError(f"the {self.name} data keep no state")

    def with_seed(self, seed: int) -> "Stream":
        """The same rows in the order of another seed, if the order depends on it."""
        return self

    def lasting(self, steps: int, begun: int = 0) -> "Stream":
        """The same rows in a run of so many steps, whose first batch is that of step `begun`: what
        depends on the length of the run is settled.
        """
        return self

    def by_part(self) -> "Mapping[str, Stream]":
        """The rows of each part of a mixture alone, by its name; empty: there are no parts."""
        return {}

    def drawn(self, position: int) -> dict[str, list[float]]:
        """Part of a mixture → [its share of the rows just before a position, the passes over it
        until there].
        """
        return {}

    def scored(self, first: int, count: int) -> int:
        """The targets that count of the rows at positions first … first+count-1."""
        return count * self.seq_len

    def loss_factor(self, first: int, count: int) -> float:
        """Factor from the mean loss over all tokens of `count` rows, those from position `first`
        on, to the mean over the targets that count; 1 where all do.
        """
        scored = self.scored(first, count)
        return count * self.seq_len / scored if scored else 0.0

    def batch(self, step: int) -> Rows:
        """Inputs and targets [batch_size, T] of step `step` (from 0)."""
        return self.rows(step * self.batch_size, self.batch_size)

    def passes(self, batches: int) -> str:
        """How often so many batches show the data, in words; empty: nobody knows."""
        shown = shown_passes(batches * self.batch_size / self.fresh)
        return f"{shown} passes over the data" if self.fresh < ENDLESS else ""

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches before any row is shown again."""
        return self.fresh // self.batch_size

    @property
    def place(self) -> str:
        """The tokens in words, with their file where they lie in one."""
        return f"{self.name} tokens"
