"""Outlier channels are those of the whole batch, on any number of data ranks; cuts of a layer are
refused.
"""

from typing import Any

import pytest

pytestmark = pytest.mark.long

Ranks = Any
OPTIONS = (
    "recipe=tetrajet_v2_outliers",
    "policy=all",
    "recipe.outliers.multiple=8",
    "recipe.outliers.start=1",
    "recipe.outliers.steps=2",
)


@pytest.mark.parametrize("cut", ["parallel.dp_shard=2", "parallel.dp_replicate=2"])
def test_two_ranks_choose_and_train_as_two_microbatches(ranks: Ranks, cut: str) -> None:
    """Of float32 weights; by default their shards are rounded to BF16 before they are sent."""
    ranks.train(2, "two", cut, "parallel.gather=fp32", *OPTIONS)
    ranks.same(ranks.reference("train.microbatch=2", *OPTIONS), "two")
    norms = [key for key in ranks.state("two") if key.endswith("outliers.norms")]
    assert len(norms) == 14, "each layer of both blocks has its norms in the checkpoint"


@pytest.mark.parametrize("cut", ["parallel.tp=2", "parallel.pp=2"])
def test_a_run_that_cuts_its_layers_is_refused(ranks: Ranks, cut: str) -> None:
    ended = ranks(2, cut, "model.kv_heads=2", "train.microbatch=1", *OPTIONS)
    assert "outlier channels" in ended.message and "recipe.outliers=null" in ended.message
