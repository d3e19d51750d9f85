"""The memory of one rank: weights, moments, gradients, activations, and what a running block needs.

    states            of the rank's shard, per parameter (`run.states`): float32 weights 4 bytes;
                      moments of AdamW 8, or 4 with optim.moments=bfloat16; what else the run keeps
    gradients         4 bytes; while microbatches add up, those of the whole stage, unsharded
    codes             of weights that stay on the rank: those of its shard, or without shards both
                      forms of every weight
    activations       what the blocks keep for backward (`blocks.py`), of the microbatches in flight
    weights in BF16   of layers without a quantised GEMM, cast once per step to the recipe's
                      dtype; not of weights that shards gather, which are freed after each use;
                      under torch.compile once per microbatch in flight
    unsharded weights two blocks' weights as the GEMMs read them (one runs, one arrives), those
                      outside the blocks, which stay gathered, and the gradients of one block and of
                      those outside
    logits            of one chunk: 8 bytes per logit; the head in BF16, its float32 gradient, the
                      gradient of its input
    reserve           RESERVE: the CUDA context, NCCL's buffers, workspaces of the GEMMs

The host holds a copy of the states while a checkpoint is written.
"""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch

from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.weights import ModelWeight
from fp4train.lab.costs.workload import Kind, Workload
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh

RESERVE: Final = 2 * 2**30
"""Bytes that are not tensors: assumed."""

USABLE: Final = 0.95
"""Share of the memory that a plan may fill; the rest is lost to fragmentation: assumed."""


class RankMemory:
    """Bytes on a rank of a pipeline stage.

    Args:
        stage: number of the pipeline stage.
        counts: number of its blocks of each kind.
    """

    def __init__(self, load: Workload, mesh: Mesh, stage: int, counts: Counter[int]) -> None:
        self.stage = stage
        outer = load.outer(stage, mesh)
        kinds = [(load.kinds[kind], number) for kind, number in counts.items()]
        unsharded = sum(number * _elements(kind.weights, mesh) for kind, number in kinds)
        unsharded += _elements(outer, mesh)
        self.parameters = unsharded / mesh.shard
        """Elements of its shard."""
        self.host = load.state_bytes * self.parameters
        """Bytes in main memory while a checkpoint is written."""
        adds_up = mesh.microbatches > 1 and mesh.shard > 1
        last = stage == mesh.pipeline - 1
        self.parts: dict[str, float] = {
            **{title: n * self.parameters for title, n in load.execution.states.items()},
            "gradients": 4 * self.parameters + (4 * unsharded if adds_up else 0.0),
            "codes of weights": sum(n * _codes(kind.weights, mesh) for kind, n in kinds),
            "activations": _activations(load, mesh, stage, kinds),
            "weights in BF16": _rounded_weights(load, mesh, stage, kinds),
            "unsharded weights": _gathered([kind.weights for kind, _ in kinds], outer, mesh),
            "logits and head": _logits(load, mesh) if last else 0.0,
            "reserve": RESERVE,
        }
        """Bytes by what they are for."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rank_memory(load: Workload, mesh: Mesh) -> RankMemory:
    """The memory of the rank that holds most, over the stages of a pipeline."""
    stages = enumerate(load.stages(mesh))
    ranks = [RankMemory(load, mesh, stage, counts) for stage, counts in stages]
    return max(ranks, key=attrgetter("total"))


def saved(block: BlockCost, mesh: Mesh) -> float:
    """Bytes that a rank keeps of one block and microbatch."""
    divided = (block.saved - block.unsplit - block.routed) / mesh.tensor
    repeated = block.unsplit / (mesh.tensor if mesh.sequence else 1)
    return (repeated + block.routed + divided) / mesh.context


def entered(block: BlockCost, mesh: Mesh) -> float:
    """Bytes of a block's input on a rank."""
    return block.input / (mesh.tensor if mesh.sequence else 1) / mesh.context


def _elements(weights: Sequence[ModelWeight], mesh: Mesh) -> float:
    return sum(weight.of_rank(mesh) for weight in weights)


def _activations(
    load: Workload,
    mesh: Mesh,
    stage: int,
    kinds: Sequence[tuple[Kind, int]],
) -> float:
    """Bytes for the microbatches in flight; of recomputed blocks the inputs, and one that runs."""
    again = load.execution.recomputed
    kept = sum(
        number * ((1 - again) * saved(kind.cost, mesh) + again * entered(kind.cost, mesh))
        for kind, number in kinds
    )
    running = max((saved(kind.cost, mesh) for kind, _ in kinds), default=0.0)
    return mesh.in_flight(stage) * kept + again * running


def _rounded_weights(
    load: Workload,
    mesh: Mesh,
    stage: int,
    kinds: Sequence[tuple[Kind, int]],
) -> float:
    """Bytes of the copies of weights in the recipe's dtype."""
    copies = float(mesh.shard == 1)
    if load.execution.compiled:  # graphs save the copy that each pass makes
        copies = mesh.in_flight(stage) * (1 - load.execution.recomputed)
    size = sum(
        number * plan.layer.weights * plan.table.torch_dtype.itemsize
        for kind, number in kinds
        for plan in kind.plans
        if not plan.quantised and plan.table.torch_dtype != torch.float32
    )
    return copies * size / mesh.tensor


def _codes(weights: Sequence[ModelWeight], mesh: Mesh) -> float:
    if mesh.shard > 1:
        return sum(weight.shard_code_bytes(mesh) for weight in weights)
    return sum(weight.resident_bytes(mesh) for weight in weights if weight.forms)


def _gathered(
    blocks: Sequence[Sequence[ModelWeight]],
    outer: Sequence[ModelWeight],
    mesh: Mesh,
) -> float:
    if mesh.shard == 1:
        return 0.0
    resident = [sum(weight.resident_bytes(mesh) for weight in weights) for weights in blocks]
    kept = sum(weight.wire_bytes(mesh) for weight in outer)
    gradients = 0.0
    if mesh.microbatches == 1:
        largest = max((_elements(weights, mesh) for weights in blocks), default=0.0)
        gradients = 4 * (largest + _elements(outer, mesh))
    return 2 * max(resident, default=0.0) + kept + gradients


def _logits(load: Workload, mesh: Mesh) -> float:
    vocabulary = load.vocabulary / mesh.tensor
    tokens = load.tokens / mesh.context
    rows = min(tokens, chunk_rows("cuda", max(1, int(vocabulary))))
    return rows * vocabulary * 8 + vocabulary * load.width * (2 + 4) + tokens * load.width * 2
