"""The memory of one rank: what it holds of weights, moments and gradients, of activations, and while a block runs.

    weights           4 bytes per float32 master weight of the rank's shard
    moments           of AdamW: 8 bytes, or 4 with optim.moments=bfloat16
    gradients         4 bytes; while microbatches add up, those of the whole stage, unsharded
    codes             of weights that stay on the rank: those of its shard, or without shards both forms of every weight
    activations       what the blocks keep for backward (`blocks.py`), for the microbatches in flight
    weights in BF16   of layers without a quantised GEMM, cast once per step to the recipe's dtype; not of weights that
                      shards gather, which are freed after each use; under torch.compile once per microbatch in flight
    unsharded weights two blocks' weights as the GEMMs read them (one runs, one arrives), those outside the blocks,
                      which stay gathered, and the gradients of one block and of those outside
    logits            of one chunk: 8 bytes per logit; the head in BF16, its float32 gradient, the gradient of its input
    reserve           RESERVE: the CUDA context, NCCL's buffers, workspaces of the GEMMs

The host holds a copy of weights and moments while a checkpoint is written.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.workload import ModelWeight, Workload
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh

RESERVE: Final = 2 * 2**30
"""Bytes that are not tensors: assumed."""

USABLE: Final = 0.95
"""Share of the memory that a plan may fill; the rest is lost to fragmentation: assumed."""


class RankMemory:
    """Bytes on a rank of a pipeline stage.

    Args:
        stage: the pipeline stage. counts: how many blocks of each kind it has.
    """

    def __init__(self, load: Workload, mesh: Mesh, stage: int, counts: Mapping[int, int]) -> None:
        self.stage = stage
        outer = load.outer(stage, mesh)
        kinds = [(load.kinds[kind], number) for kind, number in counts.items()]
        whole = sum(number * sum(w.of_rank(mesh) for w in kind.weights) for kind, number in kinds)
        whole += sum(w.of_rank(mesh) for w in outer)
        local = whole / mesh.shard
        flights = mesh.in_flight(stage)
        again = load.recomputed
        kept = sum(n * ((1 - again) * saved(k.cost, mesh) + again * entered(k.cost, mesh)) for k, n in kinds)
        rounded = sum(n * k.cost.weights / mesh.tensor for k, n in kinds)
        # Graphs of torch.compile save the copy that each pass makes.
        copies = flights * (1 - again) if load.compiled else float(mesh.shard == 1)
        running = again * max((saved(k.cost, mesh) for k, _ in kinds), default=0.0)
        self.parameters, self.host = local, load.state_bytes * local
        """Elements of its shard; bytes in main memory while a checkpoint is written."""
        self.parts: dict[str, float] = {
            "weights, float32": 4 * local,
            "moments": load.moment_bytes * local,
            "gradients": 4 * (whole if mesh.microbatches > 1 and mesh.shard > 1 else 0.0) + 4 * local,
            "codes of weights": sum(n * _codes(k.weights, mesh) for k, n in kinds),
            "activations": flights * kept + running,
            "weights in BF16": copies * rounded,
            "unsharded weights": _unsharded([k.weights for k, _ in kinds], outer, mesh),
            "logits and head": _logits(load, mesh) if stage == mesh.pipeline - 1 else 0.0,
            "reserve": RESERVE,
        }
        """Bytes by what they are for."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rank_memory(load: Workload, mesh: Mesh) -> RankMemory:
    """The memory of the rank that holds most, over the stages of a pipeline."""
    parts = enumerate(load.stages(mesh))
    return max((RankMemory(load, mesh, number, counts) for number, counts in parts), key=attrgetter("total"))


def saved(block: BlockCost, mesh: Mesh) -> float:
    """Bytes that a rank keeps of one block and microbatch."""
    whole = block.whole / (mesh.tensor if mesh.sequence else 1)
    return (whole + block.routed + (block.saved - block.whole - block.routed) / mesh.tensor) / mesh.context


def entered(block: BlockCost, mesh: Mesh) -> float:
    """Bytes of a block's input on a rank."""
    return block.input / (mesh.tensor if mesh.sequence else 1) / mesh.context


def _codes(weights: Sequence[ModelWeight], mesh: Mesh) -> float:
    if mesh.shard > 1:
        return sum(w.code_bytes(mesh) for w in weights)
    return sum(w.resident_bytes(mesh) for w in weights if w.forms)


def _unsharded(kinds: Sequence[Sequence[ModelWeight]], outer: Sequence[ModelWeight], mesh: Mesh) -> float:
    if mesh.shard == 1:
        return 0.0
    resident = max((sum(w.resident_bytes(mesh) for w in weights) for weights in kinds), default=0.0)
    gradients = max((sum(w.of_rank(mesh) for w in weights) for weights in kinds), default=0.0)
    gradients += sum(w.of_rank(mesh) for w in outer)
    kept = sum(w.wire_bytes(mesh) for w in outer)
    return 2 * resident + kept + (4 * gradients if mesh.microbatches == 1 else 0.0)


def _logits(load: Workload, mesh: Mesh) -> float:
    vocabulary, tokens = load.vocabulary / mesh.tensor, load.tokens / mesh.context
    rows = min(tokens, chunk_rows("cuda", max(1, int(vocabulary))))
    return rows * vocabulary * 8 + vocabulary * load.width * (2 + 4) + tokens * load.width * 2
