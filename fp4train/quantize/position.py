"""Positions in a run: what keys the random bits of a layer's call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp4train.quantize.random import RandomKey


class RunStep(NamedTuple):
    """A step of a run with this seed. Weights are constant within it."""

    seed: int
    number: int


class Position(NamedTuple):
    """The place of a call's tokens in a run.

    step: the step of the run.
    token: index of the first token in the global batch of the step.
    counters: the number of the step on the device, where a recorded step reads it from there
        (`RandomKey.counters`).
    """

    step: RunStep
    token: int = 0
    counters: Tensor | None = None

    def key(self, layer: int, operand: int, row: int = 0, column: int = 0) -> RandomKey:
        """The key of a tensor whose first element lies at (row, column) of the operand of a
        layer.
        """
        return RandomKey(
            seed=self.step.seed,
            step=self.step.number,
            layer=layer,
            operand=operand,
            row_offset=row,
            col_offset=column,
            counters=self.counters,
        )
