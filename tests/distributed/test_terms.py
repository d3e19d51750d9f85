"""Operands of two terms on several ranks: each rank takes the means and residuals of its own
microbatches, whether weights are sent as codes or as values; cuts of a layer are refused.
"""

from typing import Any

import pytest

pytestmark = pytest.mark.long

Ranks = Any


@pytest.mark.parametrize("recipe", ["averis", "chon", "flux_residual"])
@pytest.mark.parametrize("cut", ["parallel.dp_shard=2", "parallel.dp_replicate=2"])
def test_two_ranks_train_as_two_microbatches(ranks: Ranks, recipe: str, cut: str) -> None:
    options = (f"recipe={recipe}", "policy=all", "phases=none")
    name = f"{recipe}{cut[12:-2]}"
    gather = ("parallel.gather=fp32",) if recipe == "chon" else ()
    ranks.train(2, name, cut, *gather, *options)
    ranks.same(ranks.reference("train.microbatch=2", *options), name)


@pytest.mark.parametrize("recipe", ["averis", "chon"])
def test_a_run_that_cuts_its_layers_is_refused(ranks: Ranks, recipe: str) -> None:
    ended = ranks(2, "parallel.tp=2", "model.kv_heads=2", f"recipe={recipe}", "policy=all")
    assert "operands of two terms" in ended.message and "use parallel.tp=1" in ended.message


def test_stages_of_a_pipeline_take_the_means_of_their_microbatches(ranks: Ranks) -> None:
    options = ("recipe=averis", "policy=all", "phases=none", "train.microbatch=1")
    ranks.train(2, "stages", "parallel.pp=2", *options)
    one = [line["train/loss"] for line in ranks.losses(ranks.reference(*options))]
    two = [line["train/loss"] for line in ranks.losses("stages")]
    assert two == pytest.approx(one, abs=5e-3)
