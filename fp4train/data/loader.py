"""Batches as a pure function of (seed, position): exact resume from the step number alone.

The tokens are packed: sequence k is tokens[k·T : k·T + T + 1], its first T tokens the input and its last T the target,
so that the sequences of an epoch predict every token once (but for a tail shorter than T). The sequence shown at
position i of a run is

    permutation(seed, epoch = i // n)[i % n],  n sequences an epoch

Nothing is kept between calls. A rank or a microbatch fetches its own rows of a batch with `rows(first, count)`.
"""

import numpy as np
import torch
from torch import Tensor

from fp4train.data.permutation import permute
from fp4train.data.tokens import TokenArray


class Loader:
    """Shuffled batches of packed sequences; no state, so every step can be asked for in any order."""

    def __init__(self, tokens: TokenArray, *, batch_size: int, seq_len: int, seed: int) -> None:
        if batch_size < 1 or seq_len < 1:
            raise ValueError(f"batch_size={batch_size}, seq_len={seq_len}: allowed are whole numbers from 1")
        if len(tokens) < seq_len + 1:
            raise ValueError(f"{len(tokens)} {tokens.name} tokens: a sequence needs seq_len+1 = {seq_len + 1}")
        self.tokens = tokens
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed

    @property
    def sequences_per_epoch(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches before any sequence is shown again."""
        return self.sequences_per_epoch // self.batch_size

    def sequence_indices(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Which sequences stand at positions first … first+count-1 of the run."""
        n = self.sequences_per_epoch
        epochs, places = np.divmod(np.arange(first, first + count, dtype=np.int64), n)
        indices = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(places[here], n, seed=self.seed, epoch=int(epoch))
        return indices

    def rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [count, T] each, of positions first … first+count-1 of the run."""
        T = self.seq_len
        rows_BT1 = np.empty((count, T + 1), dtype=np.int64)  # first of all: too many rows end here
        np.add(self.sequence_indices(first, count)[:, None] * T, np.arange(T + 1), out=rows_BT1)
        # `take` lets other threads run while it waits for a disk, however short a row is; assignments do not.
        rows_BT1[...] = np.take(np.asarray(self.tokens.ids), rows_BT1)
        self.tokens.check(rows_BT1, f"{self.tokens.name} tokens at positions {first} … {first + count - 1} of the run")
        rows = torch.from_numpy(rows_BT1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch_size, T] of step `step` (from 0)."""
        return self.rows(step * self.batch_size, self.batch_size)
