"""Expert parallelism: n ranks that share the experts equal one rank that passes n microbatches."""

from typing import Any

import pytest
from families import tiny_run
from patches import DIES_AT_3, GRAPHS, told

Ranks = Any
ALL = tiny_run("moe", "model.layers=3", "model.experts.count=4", "train.microbatch=2", "policy=all")
RECIPES = ("nvfp4", "mxfp8", "fp8_current", "bf16")
SIGMOID = (
    "model.experts.scores=sigmoid",
    "model.experts.bias=true",
    "model.experts.shared=1",
    "model.balance.speed=0.01",
)
DROPPED = ("model.balance.capacity=1.0", "model.balance.z_loss=0.001")
ONE_EXPERT = ("model.experts.top=1", "model.experts.count=16", "train.seq_len=4")
RECOMPUTED = ("model.recompute=true",)
VARIANTS = {
    "shared experts and biases": SIGMOID,
    "dropped tokens": DROPPED,
    "experts without tokens": ONE_EXPERT,
    "recomputed": RECOMPUTED,
    "compiled": ("train.compile=true",),
    "delayed": ("recipe=fp8_delayed",),
    "quartet": ("recipe=quartet_ii",),
    "float32": ("parallel.gather=fp32",),
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((f"recipe={r}",), id=r, marks=() if r == "nvfp4" else pytest.mark.long)
        for r in RECIPES
    ]
    + [
        pytest.param(("recipe=nvfp4", *options), id=name, marks=pytest.mark.long)
        for name, options in VARIANTS.items()
    ],
)
def test_two_ranks_that_share_experts_are_two_microbatches(
    ranks: Ranks, options: tuple[str, ...]
) -> None:
    options = (*ALL, *options)
    ranks.train(2, "two", *options, "parallel.ep=2", patch=GRAPHS)
    ranks.same(ranks.reference(*options, patch=GRAPHS), "two")


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_four_ranks_that_sum_in_order_are_four_microbatches(ranks: Ranks, recipe: str) -> None:
    options = (*ALL, f"recipe={recipe}", "train.microbatch=1", "train.kernels=torch")
    options = (*options, "model.qk_norm=false")  # a part of it would be 4 elements
    ranks.train(4, "four", *options, "parallel.ep=4", "parallel.reduce=ordered")
    reference = ranks.reference(*options)
    assert ranks.state(reference) == ranks.state("four")


OTHER_CUTS = {
    "replicas": (("parallel.dp_replicate=2", "parallel.ep=2"), ("parallel.dp_replicate=2",), 4),
    "stages": (("parallel.pp=2", "parallel.ep=2"), ("parallel.ep=2",), 2),
    "codes": (("parallel.ep=2",), ("parallel.ep=2", "parallel.gather=fp32"), 4),
}


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "other", "count"), OTHER_CUTS.values(), ids=OTHER_CUTS)
def test_beside_other_cuts_ranks_share_experts_alike(
    ranks: Ranks, mesh: tuple[str, ...], other: tuple[str, ...], count: int
) -> None:
    options = (*ALL, "recipe=nvfp4", "train.microbatch=1")
    ranks.train(4, "more", *options, *mesh)
    ranks.same(ranks.reference(*options, *other, count=count), "more")


@pytest.mark.long
@pytest.mark.parametrize("reduce", ["float32", "ordered"])
def test_shards_of_experts_are_those_of_one_rank_but_for_the_order_of_sums(
    ranks: Ranks, reduce: str
) -> None:
    options = (*ALL, "recipe=fp32", "train.microbatch=1")
    ranks.train(4, "four", *options, "parallel.ep=2", f"parallel.reduce={reduce}")
    pairs = list(zip(ranks.losses(ranks.reference(*options)), ranks.losses("four"), strict=True))
    assert len(pairs) == 4
    for one, other in pairs:
        for key in ("train/loss", "train/grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-6), (one["step"], key)


@pytest.mark.long
def test_a_run_goes_on_with_other_shares_of_the_experts(ranks: Ranks) -> None:
    options = (*ALL, "recipe=nvfp4")
    saved = (*options, "checkpoint.every=2")
    reference = ranks.reference(*options)
    ranks.train(2, "moved", *saved, "parallel.ep=2", patch=DIES_AT_3)
    ended = ranks(2, "resume=runs/moved", "parallel.ep=1")
    assert ended.codes == [0, 0], ended.err
    ranks.same(reference, "moved")
    ranks.train(1, "back", *saved, patch=DIES_AT_3)
    ended = ranks(2, "resume=runs/back", "parallel.ep=2")
    assert ended.codes == [0, 0], ended.err
    ranks.same(reference, "back")


DIES_IN_AN_EXCHANGE = """
import os
from fp4train.nn.ranks import Ranks
exchange = Ranks.exchange
left = [8]
def dying(ranks, *arguments):
    left[0] -= 1
    if rank == 1 and not left[0]:
        os.kill(os.getpid(), 9)
    return exchange(ranks, *arguments)
Ranks.exchange = dying
"""


@pytest.mark.long
def test_a_rank_that_dies_between_rows_ends_the_others(ranks: Ranks) -> None:
    ended = ranks(2, "run.name=dies", *ALL, "parallel.ep=2", patch=DIES_IN_AN_EXCHANGE)
    assert ended.codes == [75, -9], ended.err
    assert "lost rank 1" in told(ended, by=0)
