"""A step that is queued on the device: who queues it, its results there, and its numbers on their
way to the host.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp4train.data.stream import Rows
from fp4train.precision import Recipe
from fp4train.precision.loss_scaling import SMALLEST_LOSS_SCALE

Values = dict[str, float | str]
"""The values of a line of metrics, by key."""


class Queued(NamedTuple):
    """The results of a queued step, on the device."""

    names: list[str]
    """The parameters that have gradients."""
    numbers: Tensor
    """Mean loss, norm of all gradients, norm of each (of this rank's part of it), float32."""


class StepRunner(Protocol):
    """Queues optimizer steps."""

    @property
    def counters(self) -> Tensor | None:
        """The number of the step on the device, while one is recorded; None: the host's."""

    def step(self, recipe: Recipe, rows: Iterable[Rows]) -> Queued:
        """Queue the step that `run.step` is at, on its microbatches."""

    def unrecorded(self) -> AbstractContextManager[None]:
        """A context in which all that a step calls is called, so that its tensors can be seen; its
        bits are those that it has without.
        """


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps (0: never) and at the end is due after `step`
    steps.
    """
    return step == steps or (every > 0 and step % every == 0)


class Numbers:
    """A few numbers on their way from the device to the host.

    Args:
        tensor: float32 or float64 [N].

    Attributes:
        on_device: `tensor`; where steps are replayed, that of the last one.
        at: when they were known, by `time.perf_counter`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self.on_device = self._host = tensor
        self.at = time.perf_counter()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> list[float]:
        """The numbers; waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready, self.at = None, time.perf_counter()
        numbers: list[float] = self._host.tolist()
        return numbers


@dataclass(kw_only=True)
class Step:
    """An optimizer step that is queued.

    Args:
        index: optimizer steps done before it.
        recipe: it was computed in.
        numbers: its mean loss, the norm of all gradients, and that of each (of this rank's part of
            it).
        names: the parameters of those norms.
        values: other values that are logged of it.
        scaling: state of delayed scaling before it.
        loss_scale: its loss was multiplied by.
        late: called when its numbers are read; each gives what else its line says.
    """

    index: int
    recipe: Recipe
    numbers: Numbers
    names: list[str]
    values: Values
    scaling: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    loss_scale: float = 1.0
    late: list[Callable[[], Values]] = field(default_factory=list)

    def read(self) -> tuple[float, float]:
        """Mean loss and gradient norm; waits for the device."""
        loss, norm, *_ = self.numbers.read()
        return loss, norm

    @property
    def can_be_skipped(self) -> bool:
        """Whether a smaller loss scale may mend gradients that are not finite."""
        return self.recipe.loss_scaling is not None and self.loss_scale > SMALLEST_LOSS_SCALE

    def bad_gradient(self) -> str | None:
        """The parameter nearest to the loss whose gradient is not finite: backward reaches the last
        layers first.
        """
        norms = self.numbers.read()[2:]
        bad = [
            name for name, norm in zip(self.names, norms, strict=True) if not math.isfinite(norm)
        ]
        return bad[-1] if bad else None
