"""Which factor the loss of the coming step has.

A loss scale is reached under one `recipe.loss_scaling`. Where a phase, a swap or a changed length
of the run leads to a recipe that has another one, the scale begins anew with the initial one;
where it leads to a recipe that has none, the scale is 1.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fp4train.precision import LossScaling, Recipe
from fp4train.run.state.base import LossScale, Trained


def fields_of(scaling: LossScaling | None) -> Mapping[str, Any] | None:
    """The fields of a loss scaling, by which one is told from another."""
    if scaling is None:
        return None
    return asdict(scaling)


def coming_loss_scale(run: Trained, recipe: Recipe) -> float:
    """The loss scale with which `recipe` goes on from here."""
    scaling = recipe.loss_scaling
    if run.loss_scale.scaling == fields_of(scaling):
        return run.loss_scale.value
    if scaling is None:
        return 1.0
    return scaling.initial


def begin_loss_scale(run: Trained, recipe: Recipe) -> None:
    """Let the run have the loss scale with which `recipe` goes on."""
    fields = fields_of(recipe.loss_scaling)
    if run.loss_scale.scaling != fields:
        run.loss_scale = LossScale(coming_loss_scale(run, recipe), fields)
