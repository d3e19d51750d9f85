"""Transformer Engine's real Python on several ranks, with the extension of
tests/backends/te/te_codes_on_cpu.py.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from wire import BYTES, COUNT, WEIGHTS, WIDE, plan, sent

from fp4train.backends.te import availability

pytestmark = pytest.mark.long

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

Ranks = Any
FORMS = {"nvfp4_forward_mxfp8_backward": ("nvfp4", "mxfp8")}
"""What is sent for fprop and for dgrad, where it is not the same."""
ON_TE = """
import gc, json, pathlib
import te_codes_on_cpu as codes
import te_products_on_cpu as te
import torch
kept, steps, backward = [], [], torch.Tensor.backward
def noted(self, *rest, **options):
    gc.collect()
    kept.append(sum(te.is_weight(each) for each in te.codes) + len(codes.made_of_weights))
    return backward(self, *rest, **options)
torch.Tensor.backward = noted
import fp4train.train as loop
def train_step(run, recipe, first=loop.train_step):
    if not steps:
        kept.clear()  # passes of the start, which tries the plan
    steps.append(run.step)
    shapes = [module.layer for module in run.planned_layers if module.layer.block is not None]
    te.is_weight = lambda each: any(tuple(each.shape) == (at.out_features, at.in_features) for at in shapes)
    te.quantised_from.clear()
    made = first(run, recipe)
    pathlib.Path(f"kept{rank}.json").write_text(json.dumps(kept))
    weights = [shape for shape, _ in te.quantised_from if shape in [(at.out_features, at.in_features) for at in shapes]]
    pathlib.Path(f"quantised{rank}.json").write_text(json.dumps(weights))
    return made
loop.train_step = train_step
"""
"""Every rank writes how many quantised weights of the blocks are alive before each backward pass,
and those that Transformer Engine quantised in the last step.
"""


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator[Any]:
    """Transformer Engine's Python takes seconds to import: it is done before ranks are forked."""
    experts = (availability.version() or ()) >= (2, 20)
    with serving(*("te_experts_on_cpu",) * experts, "te_codes_on_cpu") as started:
        yield started


def kept(ranks: Ranks) -> list[int]:
    return list(json.loads((ranks.folder / "kept0.json").read_text()))


def quantised(ranks: Ranks) -> int:
    return len(json.loads((ranks.folder / "quantised0.json").read_text()))


def gathered(ranks: Ranks, *, step: int) -> list[tuple[int, bool]]:
    """The bytes that a rank sent of each block in a step, and whether in backward."""
    gathers = [each for each in sent(ranks, step=step) if "gather" in each["collective"]]
    return [(each["bytes"], each["backward"]) for each in gathers if each["dtype"] == "torch.uint8"]


def two_blocks(*forms: str) -> list[tuple[float, bool]]:
    """The same of two blocks whose weights are sent so for fprop and for dgrad."""
    forward, backward = (BYTES[each] * WEIGHTS / 2 + 2 * 64 * 4 / 2 for each in forms)
    return [(forward, False)] * 2 + [(backward, True)] * 2


ON = (
    *WIDE,
    "backend=te",
    "phases=none",
    "train.steps=2",
    "train.seq_len=80",
    "eval.every=0",
)
"""No x or dy has the shape of a weight."""


@pytest.mark.parametrize(
    "recipe", ["nvfp4", "mxfp8", "fp8_current", "nvfp4_forward_mxfp8_backward"]
)
def test_two_ranks_that_send_codes_to_te_are_two_microbatches_and_keep_none(
    ranks: Ranks, recipe: str
) -> None:
    """A weight costs the bytes of its codes per gather, as on other backends, counted in the
    collectives themselves; Transformer Engine quantises none of it.
    """
    options = (*ON, f"recipe={recipe}")
    ranks.train(1, "one", "train.microbatch=2", *options, patch=ON_TE)
    assert min(kept(ranks)) >= 14 and quantised(ranks) >= 14, (
        "those of a step are kept where the weights are whole"
    )
    ranks.train(2, "two", *options, patch=ON_TE + COUNT)
    assert kept(ranks) == [0] * 2 and quantised(ranks) == 0
    ranks.same("one", "two")
    assert gathered(ranks, step=1) == two_blocks(*FORMS.get(recipe, (recipe, recipe)))
    assert plan(ranks, "two")[0].startswith(
        "weights of the blocks are gathered from 2 shards as codes and scales ("
    )


def test_the_cooldown_of_two_ranks_on_te_sends_values_for_fprop_and_codes_for_dgrad(
    ranks: Ranks,
) -> None:
    """And has the bits of one, with the amaxes of a step joined once."""
    options = (*ON, "recipe=nvfp4", "phases=cooldown_fprop", "train.steps=4")
    ranks.train(1, "one", "train.microbatch=2", *options, patch=ON_TE)
    ranks.train(2, "two", *options, patch=ON_TE + COUNT)
    ranks.same("one", "two")
    for step, forward in ((0, "nvfp4"), (3, "bf16")):
        assert gathered(ranks, step=step) == two_blocks(forward, "nvfp4")
        joined = [each["bytes"] for each in sent(ranks, step=step) if each["maximum"]]
        assert joined.count(4 * 14) == 1


def test_shards_that_cut_blocks_of_scales_are_sent_to_te_in_float32(ranks: Ranks) -> None:
    options = (*ON, "recipe=mxfp8", "model.hidden=96")
    ranks.train(1, "one", "train.microbatch=2", *options, patch=ON_TE)
    ranks.train(2, "two", *options, patch=ON_TE)
    assert kept(ranks) == [0] * 2
    ranks.same("one", "two")
    assert "mlp.gate, mlp.up of blocks 0–1 in float32 (4 B per weight)" in plan(ranks, "two")[0]


def test_te_keeps_no_codes_of_weights_that_come_in_bf16(ranks: Ranks) -> None:
    """Under delayed scaling, whose histories are its own."""
    ranks.train(2, "two", *ON, "recipe=fp8_delayed", patch=ON_TE)
    assert kept(ranks) == [0] * 2 and quantised(ranks) > 0
    assert "enters the amax of the weight into its history" in plan(ranks, "two")[0]


def test_delayed_scaling_runs_on_the_stages_of_a_pipeline_with_the_scales_of_one(
    ranks: Ranks,
) -> None:
    """Each joins its amaxes among its own ranks: over all of them, in the middle of a step, it
    would wait for ever.
    """
    options = (
        "backend=te",
        "recipe=fp8_delayed",
        "policy=all",
        "phases=none",
        "train.steps=3",
        "train.microbatch=1",
    )
    ranks.train(1, "one", *options, patch=ON_TE)
    ranks.train(2, "two", "parallel.pp=2", *options, patch=ON_TE)
    ranks.same("one", "two")


@pytest.mark.skipif(
    (availability.version() or ()) < (2, 20),
    reason="needs the transformer_engine wheel, 2.20 or newer",
)
def test_experts_on_shards_are_those_of_one_rank(ranks: Ranks) -> None:
    """On TE's GroupedLinear, whose weights are gathered for each pass; dw is summed in float32
    either way.
    """
    mixture = (
        "model=moe_tiny",
        "model.width=32",
        "model.layers=2",
        "model.hidden=64",
        "model.experts.count=4",
    )
    mixture = (
        *mixture,
        "model.heads=2",
        "model.kv_heads=2",
        "model.experts.hidden=32",
        "policy=all",
        "phases=none",
        "train.steps=3",
    )
    options = (*mixture, "backend=te", "recipe=mxfp8")
    ranks.train(1, "one", "train.microbatch=2", *options)
    ranks.train(2, "two", "train.microbatch=2", *options, "parallel.dp_shard=2")
    ranks.same("one", "two")
