"""The loss does not depend on how the work is cut: two ranks are two microbatches, in every bit."""

from typing import Any

import pytest

RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed")
Ranks = Any


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=() if r == "nvfp4" else pytest.mark.long) for r in RECIPES])
def test_two_ranks_are_two_microbatches(ranks: Ranks, recipe: str) -> None:
    options = (f"recipe={recipe}", "policy=all")
    ranks.train(1, "one", "train.microbatch=2", *options)
    ranks.train(2, "two", *options)
    ranks.same("one", "two")


@pytest.mark.long
@pytest.mark.parametrize("cut", ["parallel.dp_shard=4", "parallel.dp_replicate=2", "parallel.dp_replicate=4"])
def test_four_ranks_are_four_microbatches_but_for_the_order_of_sums(ranks: Ranks, cut: str) -> None:
    ranks.train(1, "one", "train.microbatch=1", "recipe=fp8_delayed")
    ranks.train(4, "four", cut, "recipe=fp8_delayed")
    for one, four in zip(ranks.losses("one"), ranks.losses("four"), strict=True):
        for key in ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe"):
            assert four.get(key, 0) == pytest.approx(one.get(key, 0), rel=1e-6), (one["step"], key)


@pytest.mark.long
def test_replicas_and_shards_give_the_same_bits(ranks: Ranks) -> None:
    ranks.train(2, "shards", "recipe=nvfp4")
    ranks.train(2, "replicas", "recipe=nvfp4", "parallel.dp_replicate=2")
    ranks.same("shards", "replicas")


@pytest.mark.long
@pytest.mark.parametrize("options", [("model.recompute=true",), ("train.microbatch=1", "eval.errors_every=2")])
def test_the_same_mesh_gives_the_same_bits_and_goes_on_in_them(ranks: Ranks, options: tuple[str, ...]) -> None:
    """Recomputed blocks, accumulated microbatches and measured steps among them; and a resume on fewer ranks."""
    options = ("recipe=fp8_delayed", *options)
    ranks.train(2, "whole", *options)
    ranks.train(2, "parts", *options, "checkpoint.every=3", patch=DIES_AT_4)
    ranks.train(2, "parts", *options, "checkpoint.every=3")
    ranks.same("whole", "parts")


DIES_AT_4 = """
import fp4train.train as loop
original = loop.train_step
def train_step(run, recipe):
    if run.step == 4:
        import os
        run.saver.wait(); run.world.wait(); os._exit(0)
    return original(run, recipe)
loop.train_step = train_step
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.long), pytest.param(2, 4, marks=pytest.mark.long)],
)
def test_a_run_goes_on_with_another_number_of_ranks(ranks: Ranks, before: int, after: int) -> None:
    def rows(count: int) -> str:
        return f"train.microbatch={2 if count == 1 else 4 // count}"

    ranks.train(1, "one", "train.microbatch=2")
    ranks.train(before, "moved", rows(before), "checkpoint.every=3", patch=DIES_AT_4)
    ended = ranks(after, "resume=runs/moved", rows(after))
    assert ended.codes == [0] * after, ended.err
    if after == 4:  # its microbatches are smaller
        assert [line["step"] for line in ranks.losses("moved")] == [1, 2, 3, 4, 5]
    else:
        ranks.same("one", "moved")
