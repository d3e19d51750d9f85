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

from dataclasses import dataclass
from typing import Final

from fp4train.lab.costs.weights import on_rank
from fp4train.lab.costs.workload import BlockCounts, Workload
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh

RESERVE: Final = 2 * 2**30
"""Bytes that are not tensors: assumed."""

USABLE: Final = 0.95
"""Share of the memory that a plan may fill; the rest is lost to fragmentation: assumed."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on a rank of a pipeline stage.

    Args:
        parameters: elements of its shard.
        parts: bytes by what they are for.
        host: bytes in main memory while a checkpoint is written.
    """

    stage: int
    parameters: float
    parts: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rank_memory(load: Workload, mesh: Mesh) -> RankMemory:
    """The memory of the rank that holds most, over the stages of a pipeline."""
    stages = enumerate(load.stages(mesh))
    return max((_stage_memory(load, mesh, *stage) for stage in stages), key=lambda m: m.total)


def _stage_memory(load: Workload, mesh: Mesh, stage: int, counts: BlockCounts) -> RankMemory:
    outer = on_rank(load.outer(stage, mesh), mesh)
    blocks = [(on_rank(block.weights, mesh), times) for block, times in counts.items()]
    unsharded = outer.elements + sum(times * block.elements for block, times in blocks)
    parameters = unsharded / mesh.shard
    parts = {title: size * parameters for title, size in load.states.items()}
    host = sum(parts.values())
    parts["gradients"] = 4 * parameters
    parts["codes of weights"] = sum(times * block.codes for block, times in blocks)
    parts["weights in BF16"] = sum(times * block.rounded for block, times in blocks)
    parts["activations"] = _activations(load, mesh, stage, counts)
    if mesh.shard > 1:
        resident = max((block.resident for block, _ in blocks), default=0.0)
        parts["unsharded weights"] = 2 * resident + outer.forward
        if mesh.microbatches > 1:
            parts["gradients"] += 4 * unsharded
        else:
            largest = max((block.elements for block, _ in blocks), default=0.0)
            parts["unsharded weights"] += 4 * (largest + outer.elements)
    if stage == mesh.pipeline - 1:
        parts["logits and head"] = _logits(load, mesh)
    parts["reserve"] = RESERVE
    return RankMemory(stage=stage, parameters=parameters, parts=parts, host=host)


def of_stream(size: float, mesh: Mesh) -> float:
    """Bytes on a rank of tensors of the residual stream, such as a block's input."""
    ranks = mesh.tensor if mesh.sequence else 1
    return size / ranks / mesh.context


def _activations(load: Workload, mesh: Mesh, stage: int, counts: BlockCounts) -> float:
    """Bytes for the microbatches in flight; of recomputed blocks the inputs, and one that runs."""
    again = load.recomputed
    kept = 0.0
    running = 0.0
    for block, times in counts.items():
        divided = (block.saved - block.unsplit) / mesh.tensor / mesh.context
        size = divided + of_stream(block.unsplit, mesh)
        kept += times * ((1 - again) * size + again * of_stream(block.input, mesh))
        running = max(running, size)
    return mesh.in_flight(stage) * kept + again * running


def _logits(load: Workload, mesh: Mesh) -> float:
    vocabulary = load.vocabulary / mesh.tensor
    tokens = load.tokens / mesh.context
    rows = min(tokens, chunk_rows("cuda", max(1, int(vocabulary))))
    stream = load.blocks[0].input / mesh.context
    return 8 * rows * vocabulary + (2 + 4) * on_rank(load.head, mesh).elements + stream
