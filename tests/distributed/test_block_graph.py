"""Recorded blocks on several ranks: FSDP's gathered weights, whose memory moves, the stages of a pipeline, and the
collectives of tensor-parallel ranks, which are in the graphs."""

from pathlib import Path
from typing import Any

import gpu_stand_ins
import pytest
from compiled_layers import needs_graphs

Ranks = Any

STAND_IN = """
import sys
sys.path.append({scripts!r})
import gpu_stand_ins
graphs = gpu_stand_ins.graphs(recorded={recorded!r})
graphs.__enter__()
"""
"""Each rank records on its CPU; not `recorded`: it uses the same kernels."""
TRACED = """
from compiled_layers import traced_blocks
traced = traced_blocks()
traced.__enter__()
"""


def patch(recorded: bool | str) -> str:
    return STAND_IN.format(scripts=str(Path(gpu_stand_ins.__file__).parent), recorded=recorded)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("parallel.dp_shard=2", "train.microbatch=1", "model.recompute=true"),
        ("parallel.dp_replicate=2", "parallel.dp_shard=1"),
        ("parallel.pp=2", "train.microbatch=1", "model.layers=4"),
        ("recipe=fp8_delayed", "train.microbatch=1", "model.recompute=true"),
        ("parallel.tp=2", "recipe=fp8_delayed", "train.microbatch=2", "model.recompute=true", "parallel.sp=false"),
        ("parallel.tp=2", "parallel.dp_shard=2", "train.microbatch=1"),
        pytest.param(("train.compile=true", "train.microbatch=1", "model.recompute=true"), marks=needs_graphs),
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_ranks_with_recorded_blocks_are_ranks_without(ranks: Ranks, options: tuple[str, ...]) -> None:
    """FSDP frees and gathers a block's weights around its graphs; of a pipeline several microbatches are in flight; the
    parts of tensor-parallel ranks are DTensors, beside FSDP, too. Compiled blocks have the bits of those that are not.
    The last step is replayed."""
    count = 4 if {"parallel.tp=2", "parallel.dp_shard=2"} <= set(options) else 2
    options = ("recipe=nvfp4", *options, "train.steps=5", "parallel.gather=fp32", "phases=none", "policy=all")
    for name, recorded in (("eager", False), ("blocks", "block")):
        compiled = recorded and "train.compile=true" in options
        words = (*options, "model.kv_heads=2", "eval.every=0", f"train.compile={str(compiled).lower()}")
        ranks.train(count, name, *words, patch=patch(recorded) + TRACED * compiled)
    ranks.same("eager", "blocks")
