"""The loss scale of a checkpoint, and what it was reached under."""

from types import SimpleNamespace
from typing import Any

import pytest

from fp4train.precision import FP16, NVFP4, Recipe
from fp4train.run.state.base import LossScale
from fp4train.run.state.numbers import LossScaleState, begin_loss_scale


def loaded(saved: dict[str, Any], recipe: Recipe) -> Any:
    """A run of this recipe that goes on from a saved loss scale."""
    run = SimpleNamespace(config=SimpleNamespace(recipe=recipe), loss_scale=LossScale())
    state = LossScaleState(run)  # type: ignore[arg-type]
    state.check(saved)
    state.load(saved)
    begin_loss_scale(run, recipe)  # type: ignore[arg-type]
    return run


def test_a_checkpoint_that_does_not_say_under_which_loss_scaling_keeps_its_scale() -> None:
    """Those of fp4train until November 2026."""
    run = loaded({"scale": 1024.0, "good_steps": 7}, FP16())
    assert (run.loss_scale.value, run.loss_scale.good_steps) == (1024.0, 7)
    assert loaded({"scale": 1.0, "good_steps": 0}, NVFP4()).loss_scale.value == 1.0
    assert loaded({"scale": 1.0, "good_steps": 0}, FP16()).loss_scale.value == 65536.0


@pytest.mark.parametrize("scaling", [3, "FP16", [1.0]])
def test_a_loss_scaling_that_is_no_table_is_refused(scaling: Any) -> None:
    with pytest.raises(ValueError, match="its loss scaling is"):
        loaded({"scale": 8.0, "good_steps": 0, "scaling": scaling}, FP16())
