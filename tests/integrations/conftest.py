"""What the tests of other people's loops share."""

from functools import cache
from typing import Any

import pytest
from small_transformers import reference

from fp4train.precision import NVFP4, FP8Delayed

RECIPES = {"nvfp4": NVFP4(), "fp8_delayed": FP8Delayed()}


@pytest.fixture(scope="session")
def plain() -> Any:
    """`reference` of a recipe's name, trained once."""
    return cache(lambda recipe, accumulate=1, **options: reference(RECIPES[recipe], accumulate=accumulate, **options))
