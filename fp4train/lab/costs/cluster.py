"""The cost of training a model on a mesh of GPUs: memory of a rank, collectives by link, seconds of
a step, tokens/s.

One stage and microbatch take the sum over its blocks of

    forward    max(GEMMs + quantising + attention + elementwise + tensor collectives, weight gather)
    backward   max(the same of backward + what is recomputed, weight gather [+ gradient scatter])

FSDP copies what it gathers into the weights and gradients into what it scatters, a read and a write
of each. The gathers and scatters of weights hide behind the block that runs, those of embedding and
head behind nothing; the collectives of tensor, context and expert parallelism do not hide. The rank with
the last chunk of every sequence multiplies 2 − 1/n times as much in attention as n ranks on average.
Gradients are reduced in the last microbatch only. A step is

    (m + (p−1)/v) · slowest stage + optimizer

What stages send each other is small, and not counted. The host is taken to queue kernels faster
than the GPU runs them.
"""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from fp4train.hardware import Gpu
from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.links import Collectives, Exchanges
from fp4train.lab.costs.memory import USABLE, of_stream, rank_memory
from fp4train.lab.costs.roofline import COPY
from fp4train.lab.costs.rows import layer_costs
from fp4train.lab.costs.weights import ModelWeight, exchanged_rows, on_rank, tensor_traffic
from fp4train.lab.costs.workload import BlockCounts, Workload
from fp4train.models.common.liger import MOVED
from fp4train.parallel.config import Mesh
from fp4train.precision.layer_plan import LayerPlan
from fp4train.run.state.moments import Moments

ATTENTION = 0.525
"""Share of the BF16 peak that attention reaches, forward and backward: FlashAttention-3 on H100,
causal, head dimension 128, 8 k tokens, near 0.60 and 0.50 (arXiv:2407.08608, figures 5 and 6: 600
and 550 of 989 TFLOP/s). Other GPUs: assumed equal."""

FUSED = 0.5
"""Share of the bytes counted between GEMMs that compiled blocks move, at the speed of a copy:
assumed, chains of two operations become one."""

EAGER = 0.4
"""Speed of torch's operators between GEMMs over that of a copy, where each is a kernel by itself.
Calibrated: the least squares of the logarithms of three published eager steps (torchtitan on H100,
and two of arXiv:2610.00053). It stands for all that other people's eager code takes beyond the
bytes counted here: kernels slower than a copy, gaps between them, norms and rotations in
float32."""

CAST = 6
"""Bytes per weight and step of casting its gradient from BF16 to float32. Products add those of
further microbatches in float32."""

ROUNDING = 3
"""Bytes per byte of a weight that is rounded to BF16, once per step: float32 is read."""

OPTIMIZER = 20
"""Bytes moved per parameter and step beside the moments, which are read and written: the norm reads
the gradient, AdamW reads weight and gradient and writes the weight, and torch's writes the clipped
gradient."""

ENDS = 32 + 10 + 8
"""Bytes per element of the residual stream that embedding (float32 rows are read and rounded, their
gradients added), the last norm and the loss move."""

_ROWS = ("exchanges of rows of experts", "expert")
"""Name and ranks of the exchanges of expert parallelism."""

_KEYS = ("gathers of keys and values, scatters of their gradients", "context")
"""Name and ranks of the collectives of context parallelism."""

Seconds = dict[str, float]
"""Seconds by what they are spent on."""


class BlockPass(NamedTuple):
    """A forward or a backward pass of a block and microbatch.

    Args:
        parts: its seconds; those of backward include what is recomputed.
        sent: bytes of each tensor that tensor-parallel ranks gather or scatter.
        keys: bytes of the keys and values, or of their gradients, that context-parallel ranks
            gather or scatter, each time.
        rows: bytes of what expert-parallel ranks exchange: rows and their results, or their
            gradients.
    """

    parts: Seconds
    sent: list[float]
    keys: list[float]
    rows: list[float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def apart(plan: LayerPlan) -> LayerPlan:
    """The plan of a layer that makes as many products as one does whose experts multiply the rows of
    each rank by themselves: one per expert and rank.
    """
    layer = plan.layer
    if layer.sources == 1:
        return plan
    return replace(plan, layer=replace(layer, experts=layer.group, cut=None, parts=1, sources=1))


class ClusterCost:
    """Memory, traffic and seconds of a mesh in one stretch of a run.

    Args:
        workload: a microbatch of the run.
        gpu: hardware of the ranks of `mesh`, in the machine that it is sold in.
        recomputed: share of the blocks' forward work that backward repeats; 1: only the blocks'
            inputs are kept.
    """

    def __init__(self, workload: Workload, gpu: Gpu, mesh: Mesh, recomputed: float = 0.0) -> None:
        self.workload = workload
        self.gpu = gpu
        self.mesh = mesh
        self.recomputed = recomputed
        self.memory = rank_memory(workload, mesh, recomputed)
        self._copy = gpu.bandwidth * COPY
        self._passes = {block: self._block(block) for block in set(workload.blocks)}
        stages = [self._stage(*stage) for stage in enumerate(workload.stages(mesh))]
        parts, collectives = max(stages, key=lambda stage: sum(stage[0].values()))
        waits = (mesh.pipeline - 1) / (mesh.virtual * mesh.microbatches)
        parts["pipeline bubble"] = waits * sum(parts.values())
        moved = OPTIMIZER + 2 * workload.states.get(Moments.title, 0)
        parts["optimizer"] = moved * self.memory.parameters / self._copy
        self.collectives = [flow for flow in collectives if flow.sent]
        self.parts = {name: value for name, value in parts.items() if value}
        """Seconds of a step by what they are spent on; they add up to the step."""
        self.seconds = sum(self.parts.values())
        """Seconds per optimizer step."""
        self.tokens = workload.tokens * mesh.microbatches * mesh.data
        """Tokens per optimizer step."""
        self.tokens_per_gpu = self.tokens / self.seconds / mesh.gpus
        """Tokens per second and GPU."""
        self.flops_per_gpu = self.tokens_per_gpu * workload.flops_per_token
        """Model FLOP/s of one GPU, recomputation not counted."""
        self.mfu = self.flops_per_gpu / gpu.peaks["BF16"]
        """Share of the GPU's BF16 peak, whatever the recipe, so that recipes compare."""
        self.usable = USABLE * gpu.capacity
        """Bytes of each GPU that a plan may fill."""
        self.fits = self.memory.total <= self.usable

    def _layers(self, weights: list[ModelWeight]) -> tuple[Seconds, Seconds]:
        """(Forward, backward) of linear layers and a microbatch. A weight is quantised once per
        step, or in parts by shards; whole and for each microbatch, where values are gathered.
        """
        mesh = self.mesh
        tokens = self.workload.tokens // mesh.context
        forward: Seconds = defaultdict(float)
        backward: Seconds = defaultdict(float)
        for weight in weights:
            if weight.plan is None:
                continue
            passes = 1.0
            if mesh.weight_ranks == weight.sources or weight.wire(mesh).coded:
                passes = 1 / (mesh.weight_ranks * mesh.microbatches)
            for row in layer_costs(apart(weight.plan), self.gpu, tokens, passes):
                seconds = forward if row.gemm_name == "fprop" else backward
                seconds["GEMMs"] += row.gemm / self.gpu.sustained
                seconds["quantising"] += row.quantise
        return forward, backward

    def _block(self, block: BlockCost) -> tuple[BlockPass, BlockPass]:
        """Forward and backward of a block and microbatch: the time of its layers, of attention, of
        the operations between the products, by their bytes or their arithmetic, and of collectives.
        """
        mesh = self.mesh
        ranks = mesh.tensor * mesh.context
        rate = self.gpu.sustained * ranks
        tensor = Collectives("tensor gathers and scatters", "tensor", mesh, self.gpu)
        context = Collectives(*_KEYS, mesh, self.gpu)
        exchanges = Exchanges(*_ROWS, mesh, self.gpu)
        rows = exchanged_rows(block.weights, self.workload.tokens)
        keys = block.forward.keys / mesh.tensor
        if mesh.joined:
            gathers: tuple[list[float], ...] = ([], [])
        else:
            gathers = ([keys], [(1 - self.recomputed) * keys, keys])
        slowest = 1.0 if mesh.joined else 2 - 1 / mesh.context
        traffic = tensor_traffic(block.weights, block.input / mesh.context, mesh)
        passes = []
        for parts, work, sent, gathered in zip(
            self._layers(block.weights),
            (block.forward, block.backward),
            traffic,
            gathers,
            strict=True,
        ):
            moved = work.operators / EAGER + work.kernels
            if self.workload.compiled:
                moved = FUSED * (work.operators + work.kernels)
            flops = work.flops / (self.gpu.peaks["FP32"] * rate)
            parts["attention"] = (
                slowest * work.attention / (self.gpu.peaks["BF16"] * ATTENTION * rate)
            )
            parts["elementwise"] = max(moved / ranks / self._copy, flops)
            parts["tensor collectives"] = sum(map(tensor.alone, sent))
            if mesh.context > 1:
                parts["context collectives"] = sum(map(context.alone, gathered))
            if rows:
                parts["expert collectives"] = sum(map(exchanges.alone, rows))
            passes.append(BlockPass(parts, sent, gathered, rows))
        forward, backward = passes
        backward.parts["recomputation"] = self.recomputed * forward.seconds
        return forward, backward

    def _stage(self, number: int, counts: BlockCounts) -> tuple[Seconds, list[Collectives]]:
        """Seconds of all microbatches on one stage of a pipeline, and its collectives."""
        m = self.mesh.microbatches
        parts: Seconds = defaultdict(float, recomputation=0.0)  # the first line of tables
        tensor = Collectives("tensor gathers and scatters", "tensor", self.mesh, self.gpu)
        context = Collectives(*_KEYS, self.mesh, self.gpu)
        exchanges = Exchanges(*_ROWS, self.mesh, self.gpu)
        for block, times in counts.items():
            forward, backward = self._passes[block]
            for name, value in (*forward.parts.items(), *backward.parts.items()):
                parts[name] += times * m * value
            tensor.add(times * m * (1 + self.recomputed), forward.sent)
            tensor.add(times * m, backward.sent)
            context.add(times * m * (1 + self.recomputed), forward.keys)
            context.add(times * m, backward.keys)
            exchanges.add(times * m * (1 + self.recomputed), forward.rows)
            exchanges.add(times * m, backward.rows)
        moved, gathers, reductions = self._weights(number, counts)
        parts["casts, copies of weights"] = moved / self._copy
        parts["weight gathers"] = sum(flow.exposed for flow in gathers)
        parts["gradient reduction"] = sum(flow.exposed for flow in reductions)
        if number == self.mesh.pipeline - 1:
            self._add_ends(parts)
        return parts, [*gathers, *reductions, tensor, context, exchanges]

    def _weights(
        self, number: int, counts: BlockCounts
    ) -> tuple[float, list[Collectives], list[Collectives]]:
        """(Bytes that a stage moves per step when it casts and copies weights and their gradients;
        gathers of weights; scatters and all-reduces of gradients).

        Weights outside the blocks are gathered before a forward pass and kept for its backward
        pass; their gradients are complete when nothing is left to hide behind.
        """
        mesh = self.mesh
        m = mesh.microbatches
        kinds = {1: ("", "weight_ranks"), mesh.expert: (" of experts", "expert_holders")}
        if mesh.expert == 1:
            kinds = {1: ("", "weight_ranks")}
        flows = {
            sources: tuple(
                Collectives(f"{name}{of}", kind, mesh, self.gpu)
                for name in ("weight gathers", "gradient reduction")
            )
            for sources, (of, kind) in kinds.items()
        }
        reductions = Collectives("gradient all-reduce", "replicate", mesh, self.gpu)
        moved = 0.0
        beside_nothing = BlockPass({}, [], [], [])
        units = [(block.weights, times, *self._passes[block]) for block, times in counts.items()]
        units.append((self.workload.outer(number, mesh), 1, beside_nothing, beside_nothing))
        for weights, times, forward, backward in units:
            hides, left = forward.seconds, backward.seconds
            for sources, (gathers, scatters) in flows.items():
                shared = [weight for weight in weights if weight.sources == sources]
                if not shared:
                    continue
                part = on_rank(shared, mesh, repeats=self.recomputed > 0)
                scattered = mesh.reduce_bytes * part.elements
                hides = gathers.add(times * m, [part.forward], hides)
                left = gathers.add(times * m, [part.backward], left)
                left = scatters.add(times, [scattered], left)
                reductions.add(times, 2 * [4 * part.held], left)
                moved += times * (CAST * part.elements + ROUNDING * part.rounded)
                if mesh.weight_ranks > 1:
                    moved += 2 * times * (m * (part.forward + part.backward) + scattered)
        gathered, scattered_to = zip(*flows.values(), strict=True)
        return moved, [*gathered], [*scattered_to, reductions]

    def _add_ends(self, parts: Seconds) -> None:
        """Add the seconds of what lies outside the blocks."""
        mesh = self.mesh
        m = mesh.microbatches
        ligers = self.workload.liger and mesh.tensor == 1
        logit_bytes = MOVED["cross_entropy"][0] if ligers else self.workload.logit_bytes
        logits = m * self.workload.tokens / mesh.context * self.workload.vocabulary / mesh.tensor
        stream = m * of_stream(self.workload.blocks[0].input, mesh)
        parts["elementwise"] += ENDS / 2 * stream / self._copy
        for seconds in self._layers(self.workload.head):
            parts["GEMMs of the head"] += m * sum(seconds.values())
        parts["loss"] = logit_bytes * logits / self._copy
