"""Transformer Engine's real Python on several ranks, with the extension of tests/backends/te/te_products_on_cpu.py."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from fp4train.backends.te import availability

pytestmark = pytest.mark.long

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

Ranks = Any
ON_TE = """
import gc, json, pathlib
import te_products_on_cpu as te
import torch
kept, backward = [], torch.Tensor.backward
def noted(self, *rest, **options):
    gc.collect()
    kept.append(sum(te.is_weight(each) for each in te.codes))
    return backward(self, *rest, **options)
torch.Tensor.backward = noted
import fp4train.train as loop
first = loop.train_step
def train_step(run, recipe):
    shapes = [module.layer for module in run.linears if module.layer.block is not None]
    te.is_weight = lambda each: any(tuple(each.shape) == (at.out_features, at.in_features) for at in shapes)
    made = first(run, recipe)
    pathlib.Path(f"kept{rank}.json").write_text(json.dumps(kept))
    return made
loop.train_step = train_step
"""
"""Every rank writes how many quantised weights of the blocks are alive before each backward pass."""


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator["subprocess.Popen[str]"]:
    """Transformer Engine's Python takes seconds to import: it is done before ranks are forked."""
    experts = (availability.version() or ()) >= (2, 20)
    with serving("te_experts_on_cpu" if experts else "te_products_on_cpu") as process:
        yield process


def kept(ranks: Ranks) -> list[int]:
    return list(json.loads((ranks.folder / "kept0.json").read_text()))


def test_two_ranks_are_two_microbatches_and_keep_no_codes_of_the_weights_that_they_share(ranks: Ranks) -> None:
    options = ("backend=te", "recipe=nvfp4", "policy=all", "train.steps=3", "train.seq_len=48")
    ranks.train(1, "one", "train.microbatch=2", *options, patch=ON_TE)
    assert min(kept(ranks)) == 14, "those of a step are kept where the weights are whole"
    ranks.train(2, "two", *options, patch=ON_TE)
    assert kept(ranks) == [0] * 3
    ranks.same("one", "two")


@pytest.mark.parametrize("gather", ["parallel.gather=recipe", "parallel.gather=fp32"])
def test_microbatches_of_shards_and_recomputed_blocks_have_the_same_bits(ranks: Ranks, gather: str) -> None:
    options = ("backend=te", "recipe=mxfp8", "policy=all", "train.steps=3", "train.batch_size=8", gather)
    ranks.train(2, "kept", "train.microbatch=2", *options, patch=ON_TE)
    ranks.train(2, "again", "train.microbatch=2", "model.recompute=true", *options, patch=ON_TE)
    ranks.same("kept", "again")


def test_delayed_scaling_runs_on_the_stages_of_a_pipeline_with_the_scales_of_one(ranks: Ranks) -> None:
    """Each joins its amaxes among its own ranks: over all of them, in the middle of a step, it would wait for ever."""
    options = ("backend=te", "recipe=fp8_delayed", "policy=all", "phases=none", "train.steps=3", "train.microbatch=1")
    ranks.train(1, "one", *options, patch=ON_TE)
    ranks.train(2, "two", "parallel.pp=2", *options, patch=ON_TE)
    ranks.same("one", "two")


@pytest.mark.skipif(
    (availability.version() or ()) < (2, 20), reason="needs the transformer_engine wheel, 2.20 or newer"
)
def test_experts_on_shards_are_those_of_one_rank(ranks: Ranks) -> None:
    """On TE's GroupedLinear, whose weights are gathered for each pass; dw is summed in float32 either way."""
    mixture = ("model=moe_tiny", "model.width=32", "model.layers=2", "model.hidden=64", "model.experts.count=4")
    mixture = (*mixture, "model.experts.hidden=32", "policy=all", "phases=none", "train.steps=3")
    options = (*mixture, "backend=te", "recipe=mxfp8")
    ranks.train(1, "one", "train.microbatch=2", *options)
    ranks.train(2, "two", "train.microbatch=2", *options, "parallel.dp_shard=2")
    ranks.same("one", "two")
