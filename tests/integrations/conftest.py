"""What the tests of other people's loops share."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState
from small_transformers import reference

from fp4train.precision import NVFP4, FP8Delayed

RECIPES = {"nvfp4": NVFP4(), "fp8_delayed": FP8Delayed()}


@pytest.fixture(scope="session")
def plain() -> Any:
    """`reference` of a recipe's name, trained once."""
    return cache(
        lambda recipe, accumulate=1, **options: reference(
            RECIPES[recipe], accumulate=accumulate, **options
        )
    )


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """Accelerate shares its state among all loops of a process: that of a test is not the next
    one's.
    """
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
