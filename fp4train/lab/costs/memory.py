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
    keys and values   of context parallelism: those of one block's whole sequences and their
                      gradients
    logits            of one chunk: 8 bytes per logit; the head in BF16, its float32 gradient, the
                      gradient of its input
    reserve           RESERVE: the CUDA context, NCCL's buffers, workspaces of the GEMMs

The host holds a copy of the states while a checkpoint is written.
"""

from fp4train.lab.costs.weights import on_rank
from fp4train.lab.costs.workload import BlockCounts, Workload
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh

RESERVE = 2 * 2**30
"""Bytes that are not tensors: assumed."""

USABLE = 0.95
"""Share of the memory that a plan may fill; the rest is lost to fragmentation: assumed."""


class RankMemory:
    """Bytes on a rank of a pipeline stage.

    Args:
        recomputed: see `ClusterCost`.
        counts: the stage's blocks.
    """

    def __init__(
        self, load: Workload, mesh: Mesh, recomputed: float, stage: int, counts: BlockCounts
    ) -> None:
        self.stage = stage
        outer = on_rank(load.outer(stage, mesh), mesh)
        blocks = [(on_rank(block.weights, mesh), times) for block, times in counts.items()]
        unsharded = outer.elements + sum(times * block.elements for block, times in blocks)
        self.parameters = outer.held + sum(times * block.held for block, times in blocks)
        """Elements of its shard."""
        parts = {title: size * self.parameters for title, size in load.states.items()}
        self.host = sum(parts.values())
        """Bytes in main memory while a checkpoint is written."""
        parts["gradients"] = 4 * self.parameters
        parts["codes of weights"] = sum(times * block.codes for block, times in blocks)
        parts["weights in BF16"] = sum(times * block.rounded for block, times in blocks)
        parts["activations"] = _activations(mesh, recomputed, stage, counts)
        if mesh.weight_ranks > 1:
            resident = max(block.resident for block, _ in blocks)
            parts["unsharded weights"] = 2 * resident + outer.forward
            if mesh.microbatches > 1:
                parts["gradients"] += 4 * unsharded
            else:
                largest = max(block.elements for block, _ in blocks)
                parts["unsharded weights"] += 4 * (largest + outer.elements)
        if mesh.context > 1 and not mesh.joined:
            keys = max(block.forward.keys for block in counts) / mesh.tensor
            parts["keys and values"] = 2 * keys
        if stage == mesh.pipeline - 1:
            parts["logits and head"] = _logits(load, mesh)
        parts["reserve"] = RESERVE
        self.parts = parts
        """Bytes by what they are for."""
        self.total = sum(parts.values())


def rank_memory(load: Workload, mesh: Mesh, recomputed: float = 0.0) -> RankMemory:
    """The memory of the rank that holds most, over the stages of a pipeline."""
    stages = enumerate(load.stages(mesh))
    memories = (RankMemory(load, mesh, recomputed, *stage) for stage in stages)
    return max(memories, key=lambda memory: memory.total)


def of_stream(size: float, mesh: Mesh) -> float:
    """Bytes on a rank of tensors of the residual stream, such as a block's input."""
    ranks = mesh.tensor if mesh.sequence else 1
    return size / ranks / mesh.context


def _activations(mesh: Mesh, recomputed: float, stage: int, counts: BlockCounts) -> float:
    """Bytes for the microbatches in flight; of recomputed blocks the inputs, and one that runs."""
    kept = 0.0
    running = 0.0
    for block, times in counts.items():
        divided = (block.saved - block.unsplit) / mesh.tensor / mesh.context
        size = divided + of_stream(block.unsplit, mesh)
        kept += times * ((1 - recomputed) * size + recomputed * of_stream(block.input, mesh))
        running = max(running, size)
    return mesh.in_flight(stage) * kept + recomputed * running


def _logits(load: Workload, mesh: Mesh) -> float:
    vocabulary = load.vocabulary / mesh.tensor
    rows = min(load.tokens / mesh.context, chunk_rows("cuda", max(1, int(vocabulary))))
    stream = load.blocks[0].input / mesh.context
    return 8 * rows * vocabulary + (2 + 4) * on_rank(load.head, mesh).elements + stream
