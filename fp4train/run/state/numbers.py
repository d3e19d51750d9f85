"""States that are plain numbers: the loss scale, what the loss of the run was, and how far its data
were read.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fp4train.config.binding import bind
from fp4train.precision import LossScaling, Recipe
from fp4train.run.state.base import LossScale, PlainState, Trained
from fp4train.run.supervise.loss_history import HISTORY, Divergence

SCALE = "scale"
SCALING = "scaling"
GOOD_STEPS = "good_steps"


class LossScaleState(PlainState):
    """The factor of the loss, the `recipe.loss_scaling` under which it was reached, and the good
    steps since it last changed.
    """

    key = "loss_scale"

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`."""
        return {
            SCALE: self.run.loss_scale.value,
            SCALING: self.run.loss_scale.scaling,
            GOOD_STEPS: self.run.loss_scale.good_steps,
        }

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        if not isinstance(saved, dict):
            raise ValueError("it holds no loss scale")
        scale = saved[SCALE]
        count = saved[GOOD_STEPS]
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not number or not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"its loss scale is {scale!r}")
        if type(count) is not int or count < 0:
            raise ValueError(f"its number of good steps is {count!r}")
        scaling = saved.get(SCALING)
        if scaling is not None and not isinstance(scaling, dict):
            raise ValueError(f"its loss scaling is {scaling!r}")

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        value = float(saved[SCALE])
        scaling = saved.get(SCALING)
        if SCALING not in saved and value != 1:  # an older checkpoint, which does not say
            scaling = fields_of(self.run.config.recipe.loss_scaling)
        self.run.loss_scale = LossScale(value, scaling, saved[GOOD_STEPS])


class LossHistory(PlainState):
    """The loss so far, by which a divergence is noticed, and what was skipped after one."""

    key = HISTORY

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`."""
        return asdict(self.run.divergence)

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        bind(saved, Divergence, self.key)

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        uniform = self.run.divergence.uniform
        self.run.divergence = replace(bind(saved, Divergence, self.key), uniform=uniform)


class DataPlace(PlainState):
    """The state of training data that are not found by their position alone, at the next batch."""

    key = "data_place"

    @property
    def kept(self) -> bool:
        """See `RunState.kept`."""
        return self.run.data.training.state(0) is not None

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`."""
        data = self.run.data.training
        state = data.state(self.run.batch_index * data.batch_size)
        assert state is not None
        return state

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        if not isinstance(saved, dict):
            raise ValueError("it holds no place in the data")

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        self.run.data.training.load(saved)


def fields_of(scaling: LossScaling | None) -> Mapping[str, Any] | None:
    """The fields of a loss scaling, by which one is told from another."""
    if scaling is None:
        return None
    return asdict(scaling)


def coming_loss_scale(run: Trained, recipe: Recipe) -> float:
    """The loss scale with which `recipe` goes on from here. It is reached under one loss scaling:
    where a phase, a swap or a changed length of the run leads to a recipe that has another one, it
    begins anew with the initial one; where it leads to one that has none, it is 1.
    """
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
