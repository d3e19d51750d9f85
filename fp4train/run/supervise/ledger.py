"""What came of the steps: read one step late, so that the host does not wait for the device.

A step is queued on the device as a whole: forward, backward, the gradients' norm, and an optimizer that does nothing if
loss or norm is not finite. Its numbers are copied to the host beside that and read when the next step is queued, or at
once where something depends on them (an evaluation, a checkpoint, a loss scale). After a step that failed no other one
changes the weights, so that the state before it is still there when its numbers are read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fp4train.precision import Recipe
from fp4train.precision.recipe import SMALLEST_LOSS_SCALE
from fp4train.run.supervise.guard import NonFiniteError

if TYPE_CHECKING:
    from fp4train.run.run import Run

Values = dict[str, float | str]


class Numbers:
    """A few numbers on their way from the device to the host.

    Args:
        tensor: float32 or float64 [N].
    """

    def __init__(self, tensor: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._host = tensor
        self._at = time.perf_counter()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> list[float]:
        """The numbers; waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready, self._at = None, time.perf_counter()
        found: list[float] = self._host.tolist()
        return found

    @property
    def at(self) -> float:
        """When they were known, by `time.perf_counter`."""
        return self._at


@dataclass(kw_only=True)
class Step:
    """An optimizer step that is queued.

    Args:
        index: optimizer steps done before it.
        recipe: it was computed in.
        numbers: its mean loss, the norm of all gradients, and that of each (of this rank's part of it).
        names: the parameters of those norms.
        values: what else is logged of it.
        scaling: what delayed scaling had seen before it.
        loss_scale: its loss was multiplied by.
        norms: those of this rank's part of each gradient, on the device.
        measured: logs the statistics of a measured step and gives what its line says of them.
    """

    index: int
    recipe: Recipe
    numbers: Numbers
    names: list[str]
    values: Values
    scaling: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    loss_scale: float = 1.0
    norms: Tensor | None = None
    measured: Callable[[Run], Values] | None = None

    def read(self) -> tuple[float, float]:
        """Mean loss and gradient norm; waits for the device."""
        loss, norm, *_ = self.numbers.read()
        return loss, norm

    @property
    def can_be_skipped(self) -> bool:
        """Whether a smaller loss scale may mend gradients that are not finite."""
        return self.recipe.loss_scaling is not None and self.loss_scale > SMALLEST_LOSS_SCALE

    def bad_gradient(self) -> str | None:
        """The parameter nearest to the loss whose gradient is not finite: backward reaches the last layers first."""
        norms = self.numbers.read()[2:]
        bad = [name for name, norm in zip(self.names, norms, strict=True) if not math.isfinite(norm)]
        return bad[-1] if bad else None


class Counts(Protocol):
    """Hears of every step that was done, as `Progress` does."""

    def advance(self, loss: float, recipe: str, at: float) -> Values:
        """One more step was done at `at`, by `time.perf_counter`; returns what is logged of it besides."""
        ...


class Shows(Protocol):
    """Is told the last loss, as `Watch` is."""

    loss: float | None


class Ledger:
    """Holds the step whose numbers are not read yet, and logs it when they are.

    Args:
        run, progress, watch: what hears of a step.
        blame: what was not finite in the step that `run.step` is at, whose loss is not: the first module's output.
        judge: told the loss of each step; whether the weights that gave it are good.
    """

    def __init__(
        self,
        run: Run,
        progress: Counts,
        watch: Shows,
        blame: Callable[[Run, Recipe], str],
        judge: Callable[[Run, int, float], bool] = lambda *_: True,
    ) -> None:
        self.run, self.progress, self.watch, self.blame, self.judge = run, progress, watch, blame, judge
        self.metrics: Values = {}
        self._step: Step | None = None

    def add(self, step: Step) -> None:
        """A step was queued: the one before it is read and logged.

        Raises:
            NonFiniteError: see `check`.
        """
        held, self._step = self._step, step
        if held is not None:
            self._log(held)
        if (scaling := step.recipe.loss_scaling) is not None:
            self.check()
            run, finite = self.run, math.isfinite(step.read()[1])
            run.loss_scale, run.good_steps = scaling.update(step.loss_scale, run.good_steps, finite)
            run.failed = None  # skipped, and none of the next ones' business

    def check(self) -> None:
        """Wait for the step that was added last.

        Raises:
            NonFiniteError: its loss, or a gradient that no smaller loss scale can mend, is not finite. The run is as it
                was before that step then.
        """
        if self._step is not None:
            self._check(self._step)

    def settle(self, values: Mapping[str, float | str] | None = None) -> None:
        """Wait for the step that was added last, and log it with `values`.

        Raises:
            NonFiniteError: see `check`.
        """
        held, self._step = self._step, None
        if held is not None:
            held.values |= values or {}
            self._log(held)

    def _check(self, step: Step) -> None:
        run, (loss, norm) = self.run, step.read()
        if math.isfinite(loss) and (math.isfinite(norm) or step.can_be_skipped):
            return
        self._step = None
        run.step, run.failed = step.index, None
        run.load_scaling(step.scaling)
        run.optimizer.zero_grad(set_to_none=True)
        if math.isfinite(loss):
            bad = run.world.least(step.bad_gradient(), lambda name: -run.place_of(name.rpartition(".")[0]))
            where = f"gradient of {bad}" if bad else "the norm itself (finite gradients, overflowing sum)"
            raise NonFiniteError(step.index, "gradient norm", norm, where, step.recipe.name)
        where = self.blame(run, step.recipe)
        run.load_scaling(step.scaling)
        raise NonFiniteError(step.index, "loss", loss, where, step.recipe.name)

    def _log(self, step: Step) -> None:
        self._check(step)
        loss, norm = step.read()
        values = {"train/loss": loss, "train/grad_norm": norm} | step.values
        if step.measured is not None:
            values |= step.measured(self.run)
        values |= self.progress.advance(loss, step.recipe.name, step.numbers.at)
        if self.judge(self.run, step.index, loss):
            self.run.saver.prove(step.index)
        self.watch.loss = loss
        self.run.tracker.log(step.index + 1, values)
        self.metrics |= values
