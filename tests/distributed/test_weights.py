"""Weights that are written between two steps, on two ranks."""

from typing import Any

import pytest
from wire import WIDE

pytestmark = pytest.mark.long

Ranks = Any

EMA = (*WIDE, "recipe=nvfp4", "train.steps=4", "phases=none", "eval.every=1", "train.ema=0.5")


@pytest.mark.parametrize("cut", ["parallel.dp_shard=2", "parallel.pp=2"])
def test_an_evaluation_of_other_weights_is_that_of_one_rank(ranks: Ranks, cut: str) -> None:
    """And the run trains on as if it had not been; the average is equal in every bit."""
    ranks.train(1, "one", "train.microbatch=2", *EMA)
    ranks.train(2, "two", "train.microbatch=2", cut, *EMA)
    ranks.same("one", "two")
    (*_, last) = ranks.losses("two")
    assert last["val/loss_ema"] != last["val/loss"]


def test_one_rank_goes_on_with_the_average_of_two(ranks: Ranks) -> None:
    words = (*EMA, "checkpoint.every=2", "checkpoint.keep=9")
    ranks.train(2, "two", *words)
    ranks.train(1, "one", "resume=runs/two", "resume_step=2", "train.microbatch=2")
    ranks.same("one", "two")
