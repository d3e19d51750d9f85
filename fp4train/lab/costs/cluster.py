"""The cost of training a model on a mesh of GPUs: memory of a rank, collectives by link, seconds of
a step, tokens/s.

One stage and microbatch take the sum over its blocks of

    forward    max(GEMMs + quantising + attention + elementwise + tensor collectives, weight gather)
    backward   max(the same of backward + what is recomputed, weight gather [+ gradient scatter])

FSDP copies what it gathers into the weights and gradients into what it scatters, a read and a write
of each. The gathers and scatters of weights hide behind the block that runs, those of embedding and
head behind nothing; the collectives of tensor parallelism do not hide, unless `hides_tensor`.
Gradients are reduced in the last microbatch only. A step is

    (m + (p−1)/v) · slowest stage + first gather + last scatter + sends that fill the pipeline
    + norm + optimizer

and no less than the host takes to queue its kernels; recorded steps have none.

GEMMs and quantising: `rows.py`. Passes over weights and gradients beside them, over embedded rows
and what the head reads, and the optimizer's: `casts.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fp4train.hardware import Gpu
from fp4train.lab.costs import casts
from fp4train.lab.costs.host import OPERATION, host_seconds
from fp4train.lab.costs.links import Collective, Group, Interconnect, Traffic
from fp4train.lab.costs.memory import USABLE, entered, rank_memory
from fp4train.lab.costs.roofline import COPY, sustained
from fp4train.lab.costs.rows import layer_costs
from fp4train.lab.costs.stand_ins import PassWork
from fp4train.lab.costs.traffic import AMAX, TENSOR, Wire, tensor_traffic, weight_traffic
from fp4train.lab.costs.weights import ModelWeight
from fp4train.lab.costs.workload import Kind, Workload
from fp4train.models.common.liger import MOVED
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh
from fp4train.precision.gather import wire_form
from fp4train.precision.layer_plan import LayerPlan, part_of

ATTENTION_FORWARD: Final = 0.60
ATTENTION_BACKWARD: Final = 0.50
"""Shares of the BF16 peak that attention reaches: FlashAttention-3 on H100, causal, head dimension
128, 8 k tokens (arXiv:2407.08608, figures 5 and 6: near 600 and 550 of 989 TFLOP/s). Other GPUs:
assumed equal."""

FUSED: Final = 0.5
"""Share of the bytes counted between GEMMs that compiled blocks move, at the speed of a copy:
assumed, chains of two operations become one."""

EAGER: Final = 0.37
"""Speed of torch's operators between GEMMs over that of a copy, where each is a kernel by itself.
Calibrated: the least squares of the logarithms of three published eager steps (torchtitan on H100,
and two of arXiv:2610.00053). It stands for all that other people's eager code takes beyond the
bytes counted here: kernels slower than a copy, gaps between them, norms and rotations in
float32."""

GEMM = "GEMMs"
QUANTISING = "quantising"
ATTENDING = "attention"
ELEMENTWISE = "elementwise"
HEAD = "GEMMs of the head"
LOSS = "loss"
CASTS = "casts, gradient sums"
COPIES = "copies of FSDP"
AGAIN = "recomputation"
"""What the seconds of a block and of its ends are spent on."""

FORWARD = "weight gather, forward"
BACKWARD = "weight gather, backward"
GATHERS = "weight gathers"
GRADIENTS = "gradient reduction"
SENDS = "pipeline sends"
NORMS = "norm and amax of weights"
"""What the seconds between ranks are spent on."""

Seconds = dict[str, float]
"""Seconds by what they are spent on."""


@dataclass(frozen=True, kw_only=True)
class BlockPass:
    """One pass of a block and microbatch on a rank.

    Args:
        seconds: seconds by what they are spent on, those of `sent` that nothing hides included.
        sent: bytes that ranks of tensor parallelism send each other: gathers and scatters of the
            residual stream (TENSOR), and maxima of operands whose scale is that of a tensor on
            several ranks (AMAX).
    """

    seconds: Seconds
    sent: Mapping[str, Traffic]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class ClusterCost:
    """Memory, traffic and seconds of a mesh in one stretch of a run.

    Args:
        workload: a microbatch of the run.
        gpu, links: hardware of the ranks of `mesh`.
    """

    def __init__(self, workload: Workload, gpu: Gpu, links: Interconnect, mesh: Mesh) -> None:
        self.workload = workload
        self.gpu = gpu
        self.links = links
        self.mesh = mesh
        self.memory = rank_memory(workload, mesh)
        self.not_coded = workload.not_coded(mesh)
        self._tokens = workload.tokens // mesh.context
        self._copy = gpu.bandwidth * COPY
        self._blocks = [self._block(kind) for kind in workload.kinds]
        self._wires = [self._wire(kind.weights) for kind in workload.kinds]
        stages = [self._stage(*stage) for stage in enumerate(workload.stages(mesh))]
        parts, collectives = max(stages, key=lambda stage: sum(stage[0].values()))
        if mesh.pipeline > 1:
            waits = (mesh.pipeline - 1) / (mesh.virtual * mesh.microbatches)
            parts["pipeline bubble"] = waits * sum(parts.values())
        tail, of_tail = self._tail()
        parts |= tail
        self.host = self._host()
        """Seconds that the host takes to queue a step."""
        parts["waiting for the host"] = max(0.0, self.host - sum(parts.values()))
        self.parts: Mapping[str, float] = {name: value for name, value in parts.items() if value}
        """Seconds of a step by what they are spent on; they add up to the step."""
        self.collectives = (*collectives, *of_tail)

    @property
    def seconds(self) -> float:
        """Seconds per optimizer step."""
        return sum(self.parts.values())

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.workload.tokens * self.mesh.microbatches * self.mesh.data

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.mesh.gpus

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of one GPU, recomputation not counted."""
        return self.tokens_per_gpu * self.workload.flops_per_token

    @property
    def mfu(self) -> float:
        """Share of the GPU's BF16 peak, whatever the recipe, so that recipes compare."""
        return self.flops_per_gpu / self.gpu.peaks["BF16"]

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE * self.gpu.capacity

    def _wire(self, weights: Sequence[ModelWeight], *, kept: bool = False) -> Wire:
        repeats = self.workload.execution.recomputed > 0
        shards = self._group("shard")
        replicas = self._group("replicate")
        return weight_traffic(weights, self.mesh, shards, replicas, kept=kept, repeats=repeats)

    def _group(self, kind: str) -> Group:
        return Group.along(self.mesh, kind, self.links)

    # -- one block ---------------------------------------------------------------------------------

    def _part(self, plan: LayerPlan) -> LayerPlan:
        """The part of a layer that a rank multiplies."""
        name = plan.layer.name
        cut = "in" if name in self.workload.row_wise else "out"
        return part_of(plan, cut, self.mesh.tensor, self.workload.segments.get(name, ()))

    def _layers(
        self,
        plans: Sequence[LayerPlan],
        tokens: int,
        calls: int = 1,
    ) -> tuple[Seconds, Seconds]:
        """(Forward, backward) of linear layers in so many calls of so many tokens."""
        forward: Seconds = {GEMM: 0.0, QUANTISING: 0.0}
        backward: Seconds = {GEMM: 0.0, QUANTISING: 0.0}
        parts = {plan.layer.name: self._part(plan) for plan in plans}
        for part in parts.values():
            form = wire_form(part, self.mesh.shard, self.mesh.gather)
            sharded = self.mesh.shard > 1
            again = part.dgrad.operands.second
            passes = 1.0
            if form.coded and (again is None or again.requantises is None):
                passes = 1 / (self.mesh.shard * self.mesh.microbatches)
            if not sharded:
                passes = 1 / self.mesh.microbatches
            in_bf16 = sharded and not form.coded and form.dtype == torch.bfloat16
            rows = layer_costs(
                part,
                self.gpu,
                tokens,
                calls,
                weight_passes=passes,
                weight_bytes=2 if in_bf16 else 4,
                layers=parts,
                produced=self.workload.produced,
                sharing=not self.workload.execution.compiled,
            )
            for row in rows:
                seconds = forward if row.gemm_name == "fprop" else backward
                seconds[GEMM] += row.gemm / sustained(self.gpu)
                seconds[QUANTISING] += row.quantise
        return forward, backward

    def _block(self, kind: Kind) -> tuple[BlockPass, BlockPass]:
        """(Forward, backward) of a block and microbatch."""
        forward, backward = self._layers(kind.plans, self._tokens)
        forward |= self._between_products(kind.cost.forward, ATTENTION_FORWARD)
        backward |= self._between_products(kind.cost.backward, ATTENTION_BACKWARD)
        sent_forward, sent_backward = tensor_traffic(
            kind, self.workload.row_wise, self.mesh, self._group("tensor")
        )
        return self._pass(forward, sent_forward), self._pass(backward, sent_backward)

    def _pass(self, seconds: Seconds, sent: Mapping[str, Traffic]) -> BlockPass:
        exposed = {name: traffic.seconds for name, traffic in sent.items()}
        if self.mesh.hides_tensor and TENSOR in exposed:
            exposed[TENSOR] = max(0.0, exposed[TENSOR] - seconds[GEMM])
        return BlockPass(seconds=seconds | exposed, sent=sent)

    def _between_products(self, work: PassWork, attention_share: float) -> Seconds:
        """Attention, and the operations between the products: by their bytes or their
        arithmetic."""
        ranks = self.mesh.tensor * self.mesh.context
        if self.workload.execution.compiled:
            moved = FUSED * (work.operators + work.kernels)
        else:
            moved = work.operators / EAGER + work.kernels
        rate = sustained(self.gpu) * ranks
        flops = work.flops / (self.gpu.peaks["FP32"] * rate)
        return {
            ATTENDING: work.attention / (self.gpu.peaks["BF16"] * attention_share * rate),
            ELEMENTWISE: max(moved / ranks / self._copy, flops),
        }

    # -- the step ----------------------------------------------------------------------------------

    def _stage(self, number: int, counts: Counter[int]) -> tuple[Seconds, list[Collective]]:
        """Seconds of all microbatches on one stage, and its collectives.

        Weights outside the blocks are gathered before a forward pass and kept for its backward
        pass; their gradients are complete when nothing is left to hide behind.
        """
        mesh = self.mesh
        m = mesh.microbatches
        is_first = number == 0
        is_last = number == mesh.pipeline - 1
        parts: defaultdict[str, float] = defaultdict(float)
        flows = self._flows()
        for index, times in counts.items():
            forward, backward = self._blocks[index]
            wire = self._wires[index]
            for one_way in (forward, backward):
                for name, value in one_way.seconds.items():
                    parts[name] += times * m * value
                for name, traffic in one_way.sent.items():
                    flows[name].add(times * m, traffic, one_way.seconds[name])
            again = self.workload.execution.recomputed * forward.total
            behind = backward.total + again
            parts[AGAIN] += times * m * again
            parts[COPIES] += times * wire.copied / self._copy
            parts[CASTS] += times * self._cast_bytes(index) / self._copy
            left = max(0.0, behind - wire.backward.seconds)
            flows[FORWARD].add(times * m, wire.forward, wire.forward.seconds - forward.total)
            flows[BACKWARD].add(times * m, wire.backward, wire.backward.seconds - behind)
            flows[GRADIENTS].add(times, wire.gradients, wire.gradients.seconds - left)
        outer = self._wire(self.workload.outer(number, mesh), kept=True)
        flows[FORWARD].add(m, outer.forward, outer.forward.seconds)
        flows[GRADIENTS].add(1, outer.gradients, outer.gradients.seconds)
        parts[COPIES] += outer.copied / self._copy
        parts[CASTS] += (
            casts.of_ends(self.workload, mesh, first=is_first, last=is_last) / self._copy
        )
        if is_first:
            parts[ELEMENTWISE] += m * self._residual_seconds(casts.EMBEDDED)
        if is_last:
            head, loss = self._head()
            parts[HEAD] = m * head
            parts[LOSS] = m * loss
            parts[ELEMENTWISE] += m * self._residual_seconds(casts.LAST_NORM)
        parts[GATHERS] = flows[FORWARD].exposed + flows[BACKWARD].exposed
        parts[GRADIENTS] = flows[GRADIENTS].exposed
        ranks = {FORWARD: mesh.shard, BACKWARD: mesh.shard, GRADIENTS: mesh.data}
        return dict(parts), [
            flow for name, flow in flows.items() if ranks.get(name, mesh.tensor) > 1
        ]

    def _cast_bytes(self, kind: int) -> float:
        weights = self.workload.kinds[kind].weights
        execution = self.workload.execution
        return sum(casts.of_block(weight, execution, self.mesh) for weight in weights)

    def _flows(self) -> dict[str, Collective]:
        """The collectives of a stage, of which nothing is sent yet, in the order of their list."""
        shard = self._group("shard").link
        tensor = self._group("tensor").link
        if "network" in (shard, self._group("replicate").link):
            data = "network"
        else:
            data = "NVLink"
        return {
            FORWARD: Collective(name=FORWARD, link=shard),
            BACKWARD: Collective(name=BACKWARD, link=shard),
            GRADIENTS: Collective(name=GRADIENTS, link=data),
            TENSOR: Collective(name="tensor gathers and scatters", link=tensor),
            AMAX: Collective(name=AMAX, link=tensor),
        }

    def _host(self) -> float:
        """Seconds to queue a step: those of the rank with most blocks."""
        execution = self.workload.execution
        if execution.recorded:
            return 0.0
        share = FUSED if execution.compiled else 1.0
        by_kind = []
        for kind in self.workload.kinds:
            launches = kind.cost.forward.launches + kind.cost.backward.launches
            layers = sum(host_seconds(self._part(plan), self._tokens) for plan in kind.plans)
            eager = share * OPERATION * launches + layers
            by_kind.append((1 + execution.recomputed / 3) * eager)
        stages = [
            sum(number * by_kind[kind] for kind, number in counts.items())
            for counts in self.workload.stages(self.mesh)
        ]
        return self.mesh.microbatches * max(stages, default=0.0)

    def _head(self) -> tuple[float, float]:
        """Seconds of (the layers outside the blocks, the loss), one microbatch. The loss multiplies
        the head for a chunk of the tokens at a time."""
        load = self.workload
        chunk = min(self._tokens, chunk_rows("cuda", load.vocabulary))
        seconds = 0.0
        for plan in load.outside:
            in_loss = plan.layer.out_features == load.vocabulary and not plan.quantised
            rows = chunk if in_loss else self._tokens
            calls, remainder = divmod(self._tokens, rows)
            for tokens, number in ((rows, calls), (remainder, 1)):
                if tokens:
                    for passes in self._layers([plan], tokens, number):
                        seconds += sum(passes.values())
        logit_bytes = load.execution.logit_bytes
        if load.execution.liger and self.mesh.tensor == 1:
            logit_bytes = MOVED["cross_entropy"][0]
        logits = self._tokens * load.vocabulary / self.mesh.tensor
        of_hidden = self._residual_seconds(casts.LOSS_OF_HIDDEN)
        return seconds, logit_bytes * logits / self._copy + of_hidden

    def _residual_seconds(self, moved: float) -> float:
        """Seconds of passes that move so many bytes per element of the residual stream, in BF16."""
        return moved * entered(self.workload.kinds[0].cost, self.mesh) / 2 / self._copy

    def _tail(self) -> tuple[Seconds, list[Collective]]:
        """Seconds of a step outside of its microbatches, and their collectives."""
        mesh = self.mesh
        moved = casts.of_optimizer(self.workload.execution) * self.memory.parameters
        tail = {"optimizer": moved / self._copy}
        collectives = []
        if mesh.data > 1:
            wire = self._wires[0]
            tail["first gather, last reduction"] = wire.forward.seconds + wire.gradients.seconds
            shards = self._group("shard")
            layers = len(self.workload.order) * len(self.workload.kinds[0].plans)
            traffic = shards.reduce(8) + shards.reduce(4.0 * layers)
            tail[NORMS] = traffic.seconds
            collectives.append(Collective(name=NORMS, link=shards.link))
            collectives[-1].add(1, traffic, traffic.seconds)
        if mesh.pipeline > 1:
            stages = self._group("pipeline")
            traffic = stages.send(entered(self.workload.kinds[0].cost, mesh))
            tail[SENDS] = 2 * (mesh.pipeline - 1) * traffic.seconds
            collectives.append(Collective(name=SENDS, link=stages.link, exposed=tail[SENDS]))
            collectives[-1].add(2 * mesh.microbatches * mesh.virtual, traffic, 0.0)
        return tail, collectives
