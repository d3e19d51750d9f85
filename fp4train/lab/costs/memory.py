"""The memory of one rank: weights, moments, gradients, activations, and what a running block needs.

    states            of the rank's shard, per parameter (`run.states`): float32 weights 4 bytes;
                      moments of AdamW 8, or 4 with optim.moments=bfloat16; what else the run keeps
    gradients         4 bytes; while microbatches add up, those of the whole stage, unsharded
    codes             of weights that stay on the rank: those of its shard, or without shards both
                      forms of every weight
    activations       what the blocks keep for backward (`blocks.py`), of the microbatches in flight
    weights in BF16   of layers without a quantised GEMM, cast once per step to the recipe's
                      dtype; not of weights that shards gather, which are freed after each use
    unsharded weights two blocks' weights as the GEMMs read them (one runs, one arrives), those
                      outside the blocks, which stay gathered, and the gradients of one block and of
                      those outside
    logits            of one chunk: 8 bytes per logit; the head in BF16, its float32 gradient, the
                      gradient of its input
    reserve           RESERVE: the CUDA context, NCCL's buffers, workspaces of the GEMMs

The host holds a copy of the states while a checkpoint is written.
"""

from collections import Counter
from operator import attrgetter
from typing import Final

from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.weights import ModelWeight, elements
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
        unsharded = elements(outer, mesh)
        unsharded += sum(number * elements(kind.weights, mesh) for kind, number in kinds)
        self.parameters = unsharded / mesh.shard
        """Elements of its shard."""
        self.host = load.state_bytes * self.parameters
        """Bytes in main memory while a checkpoint is written."""
        gradients = 4 * self.parameters
        if mesh.microbatches > 1 and mesh.shard > 1:
            gradients += 4 * unsharded
        logits = 0.0
        if stage == mesh.pipeline - 1:
            logits = _logits(load, mesh)
        self.parts: dict[str, float] = {
            **{title: size * self.parameters for title, size in load.execution.states.items()},
            "gradients": gradients,
            **_kept_weights(kinds, mesh),
            "activations": _activations(load, mesh, stage, kinds),
            "unsharded weights": _gathered([kind for kind, _ in kinds], outer, mesh),
            "logits and head": logits,
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
    divided = (block.saved - block.unsplit) / mesh.tensor
    return (_stream(block.unsplit, mesh) + divided) / mesh.context


def entered(block: BlockCost, mesh: Mesh) -> float:
    """Bytes of a block's input on a rank."""
    return _stream(block.input, mesh) / mesh.context


def _stream(size: float, mesh: Mesh) -> float:
    """Bytes on a rank of tensors of the residual stream."""
    if mesh.sequence:
        return size / mesh.tensor
    return size


def _activations(load: Workload, mesh: Mesh, stage: int, kinds: list[tuple[Kind, int]]) -> float:
    """Bytes for the microbatches in flight; of recomputed blocks the inputs, and one that runs."""
    again = load.execution.recomputed
    kept = sum(
        number * ((1 - again) * saved(kind.cost, mesh) + again * entered(kind.cost, mesh))
        for kind, number in kinds
    )
    running = max((saved(kind.cost, mesh) for kind, _ in kinds), default=0.0)
    return mesh.in_flight(stage) * kept + again * running


def _kept_weights(kinds: list[tuple[Kind, int]], mesh: Mesh) -> dict[str, float]:
    """Bytes of the weights as GEMMs read them that stay from step to step, by their form."""
    sizes = {"codes of weights": 0.0, "weights in BF16": 0.0}
    for kind, number in kinds:
        for weight in kind.layers:
            size = number * weight.resident_bytes(mesh)
            if mesh.shard > 1:
                codes = weight.code_bytes(mesh) if weight.wire(mesh).coded else 0.0
                sizes["codes of weights"] += number * codes / mesh.shard
            elif weight.code_bytes(mesh):
                sizes["codes of weights"] += size
            elif weight.dtype.itemsize < 4:
                sizes["weights in BF16"] += size
    return sizes


def _gathered(kinds: list[Kind], outer: list[ModelWeight], mesh: Mesh) -> float:
    if mesh.shard == 1:
        return 0.0
    resident = [sum(weight.resident_bytes(mesh) for weight in kind.weights) for kind in kinds]
    kept = sum(weight.wire_bytes(mesh) for weight in outer)
    gradients = 0.0
    if mesh.microbatches == 1:
        largest = max((elements(kind.weights, mesh) for kind in kinds), default=0.0)
        gradients = 4 * (largest + elements(outer, mesh))
    return 2 * max(resident, default=0.0) + kept + gradients


def _logits(load: Workload, mesh: Mesh) -> float:
    vocabulary = load.vocabulary / mesh.tensor
    tokens = load.tokens / mesh.context
    rows = min(tokens, chunk_rows("cuda", max(1, int(vocabulary))))
    return rows * vocabulary * 8 + vocabulary * load.width * (2 + 4) + tokens * load.width * 2
