"""A pipeline is one stage, in every bit: losses, norms, weights, moments, scales."""

from typing import Any

import pytest

RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed")
SMALL = ("model.layers=4", "train.microbatch=1")
Ranks = Any


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_stages_are_one_stage(ranks: Ranks, recipe: str) -> None:
    options = (*SMALL, f"recipe={recipe}", "policy=all")
    ranks.train(1, "one", *options)
    ranks.train(2, "two", "parallel.pp=2", *options)
    ranks.same("one", "two")
