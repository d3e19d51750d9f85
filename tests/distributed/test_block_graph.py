"""Recorded blocks on several ranks: FSDP's gathered weights, whose memory moves, and the stages of a pipeline."""

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
    ],
    ids=lambda options: options[0],
)
def test_two_ranks_with_recorded_blocks_are_two_without(ranks: Ranks, options: tuple[str, ...]) -> None:
    """FSDP frees and gathers a block's weights around its graphs; of a pipeline several microbatches are in flight."""
    options = ("recipe=nvfp4", *options, "train.steps=6", "parallel.gather=fp32")
    for name, recorded in (("eager", False), ("blocks", "block")):
        ranks.train(2, name, *options, patch=patch(recorded))
    ranks.same("eager", "blocks")
