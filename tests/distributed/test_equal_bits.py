"""The loss does not depend on how the work is cut: two ranks are two microbatches, in every bit."""

import json
from typing import Any

import pytest
from command_line import lines
from patches import DIES_AT_3

RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed")
Ranks = Any


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=() if r == "nvfp4" else pytest.mark.long) for r in RECIPES]
)
def test_two_ranks_are_two_microbatches(ranks: Ranks, recipe: str) -> None:
    options = (f"recipe={recipe}", "policy=all")
    ranks.train(2, "two", *options)
    ranks.same(ranks.reference("train.microbatch=2", *options), "two")


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_two_ranks_recompute_what_two_microbatches_do(ranks: Ranks, recipe: str) -> None:
    """Of weights that are gathered as codes (MXFP8), and with one scale as values (NVFP4); blocks
    are recomputed.
    """
    fused = ("recipe.fused_scales=true",) if recipe == "nvfp4" else ()
    options = (f"recipe={recipe}", "policy=all", "model.recompute=true", *fused)
    ranks.train(2, "two", *options)
    ranks.same(ranks.reference("train.microbatch=2", *options), "two")


@pytest.mark.long
def test_two_ranks_round_moments_of_bf16_as_two_microbatches_do(ranks: Ranks) -> None:
    options = ("recipe=bf16", "optim.moments=bfloat16", "optim.clip=1.0", "train.steps=4")
    ranks.train(2, "two", *options)
    ranks.same(ranks.reference("train.microbatch=2", *options), "two")


@pytest.mark.long
@pytest.mark.parametrize("cut", ["dp_shard", "dp_replicate"])
def test_two_ranks_descend_and_resume_as_two_microbatches_do(ranks: Ranks, cut: str) -> None:
    """Of SGD, whose means of gradients go to one rank after half of the steps."""
    options = ("recipe=bf16", "optim=sgd", "optim.lr=0.02")
    mesh = (f"parallel.{cut}=2", "checkpoint.every=2")
    ranks.train(2, "two", *options, *mesh, patch=DIES_AT_3)
    ended = ranks(1, "resume=runs/two", f"parallel.{cut}=1", "train.microbatch=2")
    assert ended.codes == [0], ended.err
    ranks.same(ranks.reference("train.microbatch=2", *options), "two")


def test_with_the_defaults_two_ranks_are_two_microbatches_while_gradients_are_clipped(
    ranks: Ranks,
) -> None:
    """Every key but the sizes has its default; one rank sums the gradient norm as two do."""
    ranks.train(2, "two", "optim.clip=1.0", "train.steps=8")
    reference = ranks.reference("train.microbatch=2", "optim.clip=1.0", "train.steps=8")
    assert sum(line["train/grad_norm"] > 1 for line in ranks.losses(reference)) >= 4
    ranks.same(reference, "two")


SLOW = """
import time
from fp4train.data.loader import Feed
from fp4train.models.common.rotary import PreNormBlock
if rank:
    forward = PreNormBlock.forward
    fetch = Feed._fetch
    PreNormBlock.forward = lambda *a, **k: time.sleep(.1) or forward(*a, **k)
    Feed._fetch = lambda *a: time.sleep(.4) or fetch(*a)
"""


def test_the_lead_names_the_slowest_rank_and_the_longest_wait_for_rows(ranks: Ranks) -> None:
    words = ("train.steps=2", "recipe=bf16", "phases=none")
    ranks.train(2, "slow", *words, patch=SLOW)
    first, *_, last = [line for line in lines(ranks.run("slow")) if "train/loss" in line]
    assert first["perf/data_wait"] >= 0.4
    assert last["perf/slowest_rank"] == 1 and last["perf/slowest_lag"] > 2


@pytest.mark.long
def test_the_lead_logs_the_ranks_speed_and_memory(ranks: Ranks) -> None:
    greedy = (
        "import torch\nheld = torch.ones(100_000_000) if rank else None\nimport "
        "builtins\nbuiltins.held = held"
    )
    ranks.train(2, "two", "train.steps=2", "recipe=bf16", patch=greedy)
    lines = [
        json.loads(line) for line in (ranks.run("two") / "metrics.jsonl").read_text().splitlines()
    ]
    last = [line for line in lines if "train/loss" in line][-1]
    assert (
        last["perf/memory_rank"] == 1
        and last["perf/memory_gb"] - last["perf/memory_gb_least"] > 0.3
    )
    assert last["perf/tokens_per_s_per_rank"] == last["perf/tokens_per_s"] / 2


@pytest.mark.long
@pytest.mark.parametrize(
    "cut", ["parallel.dp_shard=4", "parallel.dp_replicate=2", "parallel.dp_replicate=4"]
)
def test_four_ranks_are_four_microbatches_but_for_the_order_of_sums(ranks: Ranks, cut: str) -> None:
    options = ("recipe=fp8_delayed", "train.steps=3", "eval.every=0")
    reference = ranks.reference("train.microbatch=1", *options)
    ranks.train(4, "four", cut, *options)
    for one, four in zip(ranks.losses(reference), ranks.losses("four"), strict=True):
        for key in ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe"):
            assert four.get(key, 0) == pytest.approx(one.get(key, 0), rel=1e-6), (one["step"], key)


@pytest.mark.long
def test_replicas_are_two_microbatches_as_shards_are(ranks: Ranks) -> None:
    ranks.train(2, "replicas", "recipe=nvfp4", "policy=all", "parallel.dp_replicate=2")
    ranks.same(ranks.reference("train.microbatch=2", "recipe=nvfp4", "policy=all"), "replicas")


@pytest.mark.long
def test_replicas_reset_the_weights_that_oscillate_and_resume_in_a_watch(ranks: Ranks) -> None:
    watch = ("oscillation.every=3", "oscillation.watch=2", "oscillation.ratio=1.1")
    options = ("recipe=mxfp8", "policy=all", "train.steps=6", *watch)
    one = ranks.reference("train.microbatch=2", *options)
    assert any(line.get("train/oscillating") for line in ranks.losses(one))
    replicas = ("parallel.dp_replicate=2", "checkpoint.every=3", *options)
    ranks.train(2, "replicas", *replicas, patch=DIES_AT_3)
    ranks.train(2, "replicas", *replicas)
    ranks.same(one, "replicas")


@pytest.mark.long
def test_the_same_mesh_gives_the_same_bits_and_goes_on_in_them(ranks: Ranks) -> None:
    """With recomputed blocks, accumulated microbatches and measured steps."""
    options = (
        "recipe=fp8_delayed",
        "model.recompute=true",
        "train.microbatch=1",
        "eval.errors_every=3",
    )
    ranks.train(2, "whole", *options)
    ranks.train(2, "parts", *options, "checkpoint.every=2", patch=DIES_AT_3)
    ranks.train(2, "parts", *options, "checkpoint.every=2")
    ranks.same("whole", "parts")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 4, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(ranks: Ranks, before: int, after: int) -> None:
    def rows(count: int) -> str:
        return f"train.microbatch={2 if count == 1 else 4 // count}"

    ranks.train(before, "moved", rows(before), "checkpoint.every=2", patch=DIES_AT_3)
    ended = ranks(after, "resume=runs/moved", rows(after))
    assert ended.codes == [0] * after, ended.err
    if after == 4:  # its microbatches are smaller
        assert [line["step"] for line in ranks.losses("moved")] == [1, 2, 3, 4]
    else:
        ranks.same(ranks.reference("train.microbatch=2"), "moved")
