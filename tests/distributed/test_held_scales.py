"""Tensor scales that are held are those of all ranks: shards and cut layers hold the amaxes of the
whole, and a run resumes to the bit.
"""

import struct
from typing import Any

import pytest
from held_recipe import write_held

pytestmark = pytest.mark.long

Ranks = Any


@pytest.mark.parametrize(
    "cut",
    [
        ("parallel.dp_shard=2",),
        ("parallel.tp=2", "model.kv_heads=2", "train.microbatch=2"),
    ],
    ids=["codes of shards", "cut layers"],
)
def test_two_ranks_resume_to_the_bit_with_the_amaxes_of_both(
    ranks: Ranks, cut: tuple[str, ...]
) -> None:
    name = "".join(filter(str.isalnum, "".join(cut)))
    held = (*write_held(ranks.folder), "train.steps=6", "checkpoint.every=2", *cut)
    keep = ("checkpoint.keep=9", "train.batch_size=4")
    ranks.train(2, name, *held, *keep)
    branch = (f"resume=runs/{name}", "resume_step=4")
    ranks.train(2, f"{name}-branch", "--config-dir", "mine", *branch)
    ranks.same(name, f"{name}-branch")


def test_layers_that_are_cut_train_as_whole_ones(ranks: Ranks) -> None:
    options = (*write_held(ranks.folder), "model.kv_heads=2", "parallel.sp=false")
    ranks.train(1, "one", *options)
    ranks.train(2, "tp", *options, "parallel.tp=2", "train.microbatch=4")
    one = [line["train/loss"] for line in ranks.losses("one")]
    two = [line["train/loss"] for line in ranks.losses("tp")]
    assert two == pytest.approx(one, abs=5e-3)
    measured = [
        {key: value for key, value in ranks.state(name).items() if "held.step" in key}
        for name in ("one", "tp")
    ]
    assert measured[0] and measured[0] == measured[1]


@pytest.mark.parametrize("cut", ["dp_shard", "dp_replicate"])
def test_data_ranks_hold_the_largest_amax_of_their_first_microbatches(
    ranks: Ranks, cut: str
) -> None:
    """One rank measures the first of two microbatches, two ranks measure both: the amax of x in
    the first block, whose values no scale has changed yet, is not smaller.
    """
    options = (*write_held(ranks.folder), "train.steps=4", "eval.every=0")
    ranks.train(1, "one", *options, "train.microbatch=2")
    ranks.train(2, "two", *options, f"parallel.{cut}=2")
    one = [line["train/loss"] for line in ranks.losses("one")]
    two = [line["train/loss"] for line in ranks.losses("two")]
    assert two != one and two == pytest.approx(one, rel=2e-3)
    ranks.train(1, "one-step", *options, "train.microbatch=2", "train.steps=1")
    ranks.train(2, "two-step", *options, f"parallel.{cut}=2", "train.steps=1")
    name = "scaling/blocks.0.attention.wq/held.amax.x"
    (first,) = struct.unpack("f", ranks.state("one-step")[name])
    (largest,) = struct.unpack("f", ranks.state("two-step")[name])
    assert largest >= first
