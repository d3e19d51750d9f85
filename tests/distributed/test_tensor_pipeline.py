"""Tensor parallelism on the stages of a pipeline: for a fixed tp, stages change no bit."""

from typing import Any

import pytest

Ranks = Any
SMALL = ("model.layers=4", "model.kv_heads=2", "train.microbatch=1", "policy=all")


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_two_stages_of_two_tensor_parallel_ranks_are_one_stage(ranks: Ranks, recipe: str) -> None:
    options = (*SMALL, f"recipe={recipe}", "parallel.tp=2")
    ranks.train(2, "one", *options)
    ranks.train(4, "two", *options, "parallel.pp=2")
    ranks.same("one", "two")
