"""What ranks of a small model send each other of its weights: counted in the collectives, and said
in the plan.
"""

import json
from typing import Any

Ranks = Any

WIDE = (
    "model.width=64",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=2",
    "model.hidden=128",
    "train.steps=4",
    "policy=all",
)
"""Shards of two ranks are whole blocks of 32 rows."""

COUNT = """
import atexit, json, pathlib
import torch, torch.distributed as dist
sent = []
for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single"):
    original = getattr(dist, name, None)
    if original is None:
        continue
    def counted(*tensors, original=original, name=name, **options):
        tensor = options.get("input_tensor", tensors[0 if name == "all_reduce" else 1] if tensors else None)
        maximum = options.get("op") == dist.ReduceOp.MAX
        backward = torch._C._current_graph_task_id() != -1
        sent.append((name, tensor.nbytes, str(tensor.dtype), maximum, backward, step[0]))
        return original(*tensors, **options)
    setattr(dist, name, counted)
import fp4train.train as loop
step = [None]
def train_step(run, recipe, first=loop.train_step):
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
    found = [
        dict(zip(names, each, strict=True))
        for each in json.loads((ranks.folder / "sent1.json").read_text())
    ]
    return [each for each in found if each["step"] == step]


WEIGHTS = 4 * 64 * 64 + 3 * 64 * 128
"""Of a block's linear layers; beside them it has two norms of 64."""


BYTES = {
    **{
        "nvfp4": 0.5 + 1 / 256,
        "nvfp4_dequantised": 0.5 + 1 / 256,
        "mxfp4": 0.5 + 1 / 32,
        "mxfp8": 1 + 1 / 32,
    },
    **{"fp8_current": 1, "fp8_delayed": 1, "bf16": 2, "mxfp6": 1 + 1 / 32},
    # A float32 scale for each of 576 rows, which are no longer than an outer block.
    **{
        "quartet_ii": 0.5 + 1 / 16,
        "tetrajet_v2": 0.5 + 1 / 16 + 4 * 576 / (4 * 64 * 64 + 3 * 64 * 128),
    },
}
"""Per weight and gather."""


def plan(ranks: Ranks, name: str) -> list[str]:
    """What plan.txt says about the gather."""
    text = (ranks.folder / "runs" / name / "plan.txt").read_text(encoding="utf-8")
    lines = text.splitlines()
    start = next(
        (n for n, line in enumerate(lines) if line.startswith("weights of the blocks")), len(lines)
    )
    return lines[start:]
