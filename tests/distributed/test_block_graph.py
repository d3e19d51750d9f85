"""Recorded blocks on several ranks: FSDP's gathered weights, whose memory moves, the stages of a pipeline, and the
collectives of tensor-parallel ranks, which are in the graphs."""

from pathlib import Path
from typing import Any

import gpu_stand_ins
import pytest

Ranks = Any

STAND_IN = """
import sys
sys.path.append({scripts!r})
import gpu_stand_ins
graphs = gpu_stand_ins.graphs(recorded={recorded!r})
graphs.__enter__()
"""
"""Each rank records on its CPU; not `recorded`: it uses the same kernels."""


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
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_ranks_with_recorded_blocks_are_ranks_without(ranks: Ranks, options: tuple[str, ...]) -> None:
    """FSDP frees and gathers a block's weights around its graphs; of a pipeline several microbatches are in flight; the
    parts of tensor-parallel ranks are DTensors, beside FSDP, too. The last step is replayed."""
    count = 4 if {"parallel.tp=2", "parallel.dp_shard=2"} <= set(options) else 2
    options = ("recipe=nvfp4", *options, "train.steps=5", "parallel.gather=fp32", "phases=none", "policy=all")
    for name, recorded in (("eager", False), ("blocks", "block")):
        ranks.train(count, name, *options, "model.kv_heads=2", "eval.every=0", patch=patch(recorded))
    ranks.same("eager", "blocks")
