"""Non-finite numbers are never hidden: the run stops and says which layer they came from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fp4train.errors import UserError
from fp4train.precision import Recipe
from fp4train.run.finite import first_non_finite
from fp4train.run.step import eagerly, losses, microbatches, step_rows

if TYPE_CHECKING:
    from fp4train.run.run import Run


class NonFiniteTensor(NamedTuple):
    """The first tensor that is not finite.

    Args:
        what: "weight", or "output of" a module.
        name: name of the parameter or module.
    """

    what: str
    name: str

    def __str__(self) -> str:
        return f"{self.what} {self.name}"

    @property
    def module(self) -> str:
        """The module that it belongs to."""
        if self.what == "weight":
            return self.name.rpartition(".")[0]
        return self.name


class NonFiniteError(UserError):
    """A loss, gradient, weight or moment is NaN or infinite.

    Args:
        step, what, value, where, recipe: for the message.
        of_state: the state after a step is bad, and not only what the next one would make of it.
    """

    def __init__(
        self, step: int, what: str, value: float, where: str, recipe: str, *, of_state: bool = False
    ) -> None:
        super().__init__(f"step {step}: {what} is {value} in {recipe}; first non-finite: {where}")
        self.of_state = of_state


def first_non_finite_output(
    model: nn.Module, losses: Iterable[Tensor], *, cut: bool = False
) -> NonFiniteTensor | None:
    """The first module whose output is not finite while `losses`, an iterator over forward passes,
    is consumed.

    Named is the innermost one: a block's output is bad because a layer's is. None: every output is
        finite.

    Args:
        cut: the model is cut over ranks, which must all make the same passes; then all of `losses`
            is consumed.
    """
    tensors: list[NonFiniteTensor] = []

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not tensors and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            tensors.append(NonFiniteTensor("output of", name or type(module).__name__))

    handles = [
        module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            bad = first_non_finite(dict(model.named_parameters()))
            if bad and not cut:
                return NonFiniteTensor("weight", bad)
            for _ in losses:
                if tensors and not cut:
                    return tensors[0]
            if bad or tensors:
                return NonFiniteTensor("weight", bad) if bad else tensors[0]
    finally:
        for handle in handles:
            handle.remove()
    return None


def blame(run: Run, recipe: Recipe) -> str:
    """The first tensor that is not finite in the step that `run.step` is at."""
    run.apply(run.course.plan.at(run.step))
    with eagerly(run):
        passes = losses(run, microbatches(run, recipe, step_rows(run)))
        where = first_non_finite_output(run.model, passes, cut=run.world.size > 1)
    # Ranks that share a sum see what came from another one: the earliest module of the whole model
    # is where it began.
    origin = run.world.least(
        where, lambda origin: (origin.what != "weight", run.place_of(origin.module))
    )
    return str(origin or "the loss itself")
