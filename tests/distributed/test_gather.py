"""FSDP's gather of weights as codes and scales: what is sent, and that the loss does not know."""

import json
from typing import Any

import pytest

Ranks = Any

WIDE = (
    *("model.width=64", "model.layers=2", "model.heads=2", "model.kv_heads=2", "model.hidden=128"),
    *("train.steps=6", "policy=all"),
)
"""Shards of two ranks are whole blocks of 32 rows."""

COUNT = """
import atexit, json, pathlib
import torch, torch.distributed as dist
sent = []
for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce"):
    original = getattr(dist, name, None)
    if original is None:
        continue
    def counted(*tensors, original=original, name=name, **options):
        tensor = options.get("input_tensor", tensors[-1 if "gather" in name else 0] if tensors else None)
        maximum = options.get("op") == dist.ReduceOp.MAX
        backward = torch._C._current_graph_task_id() != -1
        sent.append((name, tensor.nbytes, str(tensor.dtype), maximum, backward, step[0]))
        return original(*tensors, **options)
    setattr(dist, name, counted)
import fp4train.train as loop
step, first = [None], loop.train_step
def train_step(run, recipe):
    step[0] = run.step
    made = first(run, recipe)
    step[0] = None
    pathlib.Path(f"sent{rank}.json").write_text(json.dumps(sent))
    return made
loop.train_step = train_step
"""
"""Every rank records the bytes that it gives to each collective."""


def sent(ranks: Ranks, *, step: int) -> list[dict[str, Any]]:
    """What rank 1 sent in a step."""
    names = ("collective", "bytes", "dtype", "maximum", "backward", "step")
    found = [dict(zip(names, each, strict=True)) for each in json.loads((ranks.folder / "sent1.json").read_text())]
    return [each for each in found if each["step"] == step]


WEIGHTS = 4 * 64 * 64 + 3 * 64 * 128
"""Of a block's linear layers; beside them it has two norms of 64."""


@pytest.mark.parametrize(
    ("recipe", "each"),
    [
        *(("nvfp4", 0.5 + 1 / 256), ("nvfp4_four_over_six", 0.5 + 1 / 256), ("mxfp4", 0.5 + 1 / 32)),
        *(("mxfp8", 1 + 1 / 32), ("fp8_current", 1), ("fp8_delayed", 1), ("bf16", 2)),
    ],
)
def test_two_ranks_that_send_codes_are_two_microbatches(ranks: Ranks, recipe: str, each: float) -> None:
    """And a weight costs so many bytes per gather, counted in the collectives themselves."""
    options = (*WIDE, f"recipe={recipe}")
    ranks.train(1, "one", "train.microbatch=2", *options)
    ranks.train(2, "two", *options, patch=COUNT)
    ranks.same("one", "two")
    gathers = [found for found in sent(ranks, step=3) if "gather" in found["collective"]]
    root = [found for found in gathers if found["dtype"] == "torch.float32"]
    assert [found["backward"] for found in root] == [False]
    blocks = [found["bytes"] for found in gathers if found not in root]
    assert blocks == [each * WEIGHTS / 2 + 2 * 64 * 4 / 2] * 4  # two blocks, forward and backward
    assert each <= 0.51 or recipe not in ("nvfp4", "nvfp4_four_over_six")


def test_the_amaxes_of_all_weights_are_joined_once_per_step(ranks: Ranks) -> None:
    ranks.train(2, "two", *WIDE, "recipe=nvfp4", "train.microbatch=1", patch=COUNT)
    joined = [found["bytes"] for found in sent(ranks, step=3) if found["maximum"] and found["dtype"] == "torch.float32"]
    assert joined == [4 * 14]  # of 14 weights, for two microbatches, forward and backward


FEATURES = {
    "microbatches": ("train.microbatch=1",),
    "recomputed blocks": ("model.recompute=true",),
    "measured steps": ("eval.errors_every=2", "train.microbatch=1"),
    "kept blocks": ("policy=last15",),
    "a phase": ("phases=cooldown_fprop",),
}


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_delayed"])
@pytest.mark.parametrize("feature", FEATURES)
def test_codes_give_the_bits_of_float32(ranks: Ranks, feature: str, recipe: str) -> None:
    options = (*WIDE, f"recipe={recipe}", *FEATURES[feature])
    ranks.train(2, "float32", *options, "parallel.gather=fp32")
    ranks.train(2, "codes", *options, "parallel.gather=recipe")
    ranks.same("float32", "codes")


@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block", "nvfp4_unbiased", "nvfp4_plain", "mxfp6", "nvfp4_forward_mxfp8_backward"])
def test_other_forms_of_weights(ranks: Ranks, recipe: str) -> None:
    options = (*WIDE, f"recipe={recipe}")
    ranks.train(2, "float32", *options, "parallel.gather=fp32")
    ranks.train(2, "codes", *options, "parallel.gather=recipe")
    ranks.same("float32", "codes")
