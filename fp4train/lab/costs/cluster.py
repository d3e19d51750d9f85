"""The cost of training a model on a mesh of GPUs: memory of a rank, collectives by link, seconds of a step, tokens/s.

One stage and microbatch take the sum over its blocks of

    forward    max(GEMMs + quantising + attention + elementwise + tensor collectives, weight gather)
    backward   max(the same of backward + what is recomputed,                        weight gather [+ gradient scatter])

FSDP copies what it gathers into the weights and gradients into what it scatters, a read and a write of each. The
gathers and scatters of weights hide behind the block that runs, those of embedding and head behind nothing; the
collectives of tensor parallelism do not, unless `hides_tensor`. Gradients are reduced in the last microbatch only. A
step is

    (m + (p−1)/v) · slowest stage + first gather + last scatter + sends that fill the pipeline + norm + optimizer

GEMMs and quantising: `estimate.py`. Parameters of the rest:
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fp4train.hardware import Gpu
from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.estimate import layer_costs
from fp4train.lab.costs.links import Collective, Flow, Group, Interconnect, Wire
from fp4train.lab.costs.memory import USABLE, RankMemory, entered, rank_memory
from fp4train.lab.costs.roofline import COPY, needs_amax
from fp4train.lab.costs.workload import Kind, ModelWeight, Workload, stages
from fp4train.parallel.config import Mesh
from fp4train.precision.gather import wire_form
from fp4train.precision.plan import LayerPlan, part_of
from fp4train.quantize import QuantSpec, packed_bytes

ATTENTION: Final = (0.60, 0.50)
"""Share of the BF16 peak that attention reaches forward and backward: FlashAttention-3 on H100, causal, head dimension
128, 8 k tokens (arXiv:2407.08608, figures 5 and 6: near 600 and 550 of 989 TFLOP/s). Other GPUs: assumed equal."""

SUSTAINED: Final = 0.82
"""Rate of products in training over that of a short benchmark: clocks fall under a long load. Transformer Engine's
benchmark on B300 reaches 0.72 of the BF16 peak where short ones on H200 and B200 reach 0.88 (`roofline.gemm_share`):
0.72 / 0.88 = 0.82. Rates of B300 and GB300 come from that benchmark and are not lowered again."""

FUSED: Final = 0.5
"""Share of the eager bytes between GEMMs that compiled blocks move: assumed, chains of two operations become one."""

LOGIT_BYTES: Final = 36
"""Bytes moved per logit by the chunked cross-entropy (`models/common/loss.py`): its operations' reads and writes."""

OPTIMIZER_BYTES: Final = 36
"""Bytes moved per parameter and step: AdamW reads weight, moments and gradient and writes three; the norm reads the
gradient, and zeroing writes it."""

BACKWARD_ATTENTION: Final = 2.5
"""FLOP of attention's backward over those of its forward: five products instead of two."""


@dataclass(frozen=True, kw_only=True)
class ClusterCost:
    """What a mesh holds, sends and costs in one stretch of a run.

    Args:
        parts: seconds of a step by what they are spent on; they add up to the step.
        not_coded: why → kind of layer → number of its quantised weights that are not gathered as codes.
    """

    gpu: Gpu
    links: Interconnect
    mesh: Mesh
    workload: Workload
    memory: RankMemory
    collectives: tuple[Collective, ...]
    parts: Mapping[str, float]
    not_coded: Mapping[str, Mapping[str, int]]

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


GEMM, QUANTISING, ATTENDING, ELEMENTWISE = "GEMMs", "quantising", "attention", "elementwise"
TENSOR, AMAX = "tensor collectives", "amax over tensor ranks"
"""What the seconds of a block are spent on."""


class _Pass(dict[str, float]):
    """Seconds of one block and microbatch on a rank, forward or backward, by what they are spent on.

    `collectives`: TENSOR and AMAX → bytes sent, and seconds of the collectives alone.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((GEMM, QUANTISING, ATTENDING, ELEMENTWISE, TENSOR, AMAX), 0.0))
        self.collectives = {TENSOR: (0.0, 0.0), AMAX: (0.0, 0.0)}

    @property
    def total(self) -> float:
        return sum(self.values())


def cluster_cost(load: Workload, gpu: Gpu, links: Interconnect, mesh: Mesh) -> ClusterCost:
    """The cost of one step of `load` on `mesh`, whose ranks are `gpu`s linked by `links`."""
    return _Estimate(load, gpu, links, mesh).cost()


class _Estimate:
    def __init__(self, load: Workload, gpu: Gpu, links: Interconnect, mesh: Mesh) -> None:
        self.load, self.gpu, self.links, self.mesh = load, gpu, links, mesh
        self.tokens = load.tokens // mesh.context
        self.groups = {kind: Group.along(mesh, kind, links) for kind in ("tensor", "shard", "replicate", "pipeline")}
        self.bandwidth = gpu.bandwidth * COPY
        self.rate = SUSTAINED if gpu.capability != (10, 3) else 1.0
        self.blocks = [self.block(kind) for kind in load.kinds]
        self.sends = [self.weights(kind.weights) for kind in load.kinds]

    # -- one block ----------------------------------------------------------------------------------------------------

    def split(self, plan: LayerPlan) -> LayerPlan:
        """The part of a layer that a rank multiplies."""
        return part_of(plan, "in" if plan.layer.name in self.load.row_wise else "out", self.mesh.tensor)

    def layers(self, plans: Sequence[LayerPlan]) -> tuple[_Pass, _Pass]:
        """GEMMs and quantising of linear layers, one microbatch."""
        forward, backward = _Pass(), _Pass()
        for plan in plans:
            mine = self.split(plan)
            form = wire_form(mine, self.mesh.shard, self.mesh.gather)
            again = mine.dgrad.operands.second
            # What is requantised from codes is whole on every rank, and freed after each pass.
            parts = form.coded and (again is None or again.requantises is None)
            shared = self.mesh.shard * self.mesh.microbatches if parts else 1
            passes = 1 / (shared if self.mesh.shard > 1 else self.mesh.microbatches)
            for row in layer_costs(mine, self.gpu, self.tokens, 1, weight_passes=passes):
                into = forward if row.gemm_name == "fprop" else backward
                into[GEMM] += row.gemm / self.rate
                into[QUANTISING] += row.quantise
        return forward, backward

    def block(self, kind: Kind) -> tuple[_Pass, _Pass]:
        """(forward, backward) of a block and microbatch."""
        cost, plans = kind.cost, kind.plans
        forward, backward = self.layers(plans)
        cut, peak = self.mesh.tensor * self.mesh.context, self.gpu.peaks["BF16"]
        flops = sum(a.flops for a in cost.attentions) / cut / self.rate
        fused = FUSED if self.load.compiled else 1.0
        for seconds, products, share, moved in (
            (forward, 1.0, ATTENTION[0], cost.forward),
            (backward, BACKWARD_ATTENTION, ATTENTION[1], cost.backward),
        ):
            seconds[ATTENDING] = products * flops / (peak * share)
            seconds[ELEMENTWISE] = fused * moved / cut / self.bandwidth
        self._tensor(cost, plans, forward, backward)
        return forward, backward

    def _tensor(self, cost: BlockCost, plans: Sequence[LayerPlan], forward: _Pass, backward: _Pass) -> None:
        """Adds the collectives of tensor parallelism.

        Forward gathers the inputs of column-wise layers and scatters the sums of row-wise ones; backward gathers their
        dy, scatters dx, and gathers x again for wgrad, since a rank keeps its tokens only. Without sequence parallelism
        the sums are all-reduced and nothing else is sent.
        """
        mesh, group = self.mesh, self.groups["tensor"]
        rows = [p for p in plans if p.layer.name in self.load.row_wise]
        columns = [p for p in plans if p.layer.name not in self.load.row_wise]
        if mesh.tensor == 1 or not rows:
            return
        whole = cost.input / mesh.context
        sums = whole if mesh.joined else 2 * whole
        split = columns[: len(rows)] if mesh.joined else columns
        if mesh.sequence:
            gathered = [self._form(whole, p.fprop.operands.first) for p in columns[: len(rows)]]
            dy = [self._forms(whole, p.dgrad.operands.first, p.wgrad.operands.first) for p in rows]
            again = [self._form(whole, p.wgrad.operands.second) for p in split]
            sizes = ([*gathered, *[sums] * len(rows)], [*dy, *again, *[sums] * len(split)])
        else:
            sizes = ([sums] * 2 * len(rows), [sums] * 2 * len(split))
        operands = ([p.fprop.operands.first for p in plans], [p.dgrad.operands.first for p in plans])
        for seconds, sent, quantised in zip((forward, backward), sizes, operands, strict=True):
            alone = sum(group.gather_seconds(size) for size in sent)
            seconds.collectives[TENSOR] = sum(group.sent(size) for size in sent), alone
            seconds[TENSOR] = max(0.0, alone - seconds[GEMM]) if mesh.hides_tensor else alone
            # The scale of an operand may need the amax of the whole tensor, over all ranks that share it.
            amaxes = sum(spec is not None and needs_amax(spec) for spec in quantised)
            seconds[AMAX] = group.reduce_seconds(0.0) * amaxes
            seconds.collectives[AMAX] = amaxes * group.sent(8), group.reduce_seconds(0.0) * amaxes

    def _form(self, whole: float, spec: QuantSpec | None) -> float:
        """Bytes of an activation of `whole` BF16 bytes when it is gathered, as codes if it is quantised."""
        if spec is None or not self.mesh.codes:
            return whole
        side = 1 << 12
        return whole / 2 * packed_bytes(spec, side, side) / side**2

    def _forms(self, whole: float, row: QuantSpec | None, column: QuantSpec | None) -> float:
        """The same for both forms of a tensor; one tensor in high precision serves both."""
        if row is None or column is None or not self.mesh.codes:
            return whole
        return self._form(whole, row) + self._form(whole, column)

    def weights(self, weights: Sequence[ModelWeight], *, kept: bool = False) -> Wire:
        """What it takes to gather some weights and to reduce their gradients; `kept`: from forward to backward."""
        wire = sum(weight.wire_bytes(self.mesh) for weight in weights)
        repeats = self.load.recomputed > 0
        backward = () if kept else weights
        again = sum(weight.wire_bytes(self.mesh, backward=True, repeats=repeats) for weight in backward)
        elements = sum(weight.of_rank(self.mesh) for weight in weights)
        gradient = self.mesh.reduce_bytes * elements
        shard, replicas = self.groups["shard"], self.groups["replicate"]
        part = 4 * elements / self.mesh.shard
        return Wire(
            gather=shard.gather_seconds(wire),
            gathered=shard.sent(wire),
            again=shard.gather_seconds(again),
            gathered_again=shard.sent(again),
            reduce=shard.gather_seconds(gradient) + replicas.reduce_seconds(part),
            reduced=shard.sent(gradient) + 2 * replicas.sent(part),
            copied=2 * (self.mesh.microbatches * (wire + again) + gradient) if self.mesh.shard > 1 else 0.0,
        )

    # -- the step -----------------------------------------------------------------------------------------------------

    def cost(self) -> ClusterCost:
        mesh, load = self.mesh, self.load
        found = {}
        for number, blocks in enumerate(stages(mesh, len(load.order))):
            counts = load.stage(blocks)
            outer = load.outer(number, mesh)
            key = (*sorted(counts.items()), number == mesh.pipeline - 1, *(weight.name for weight in outer))
            if key not in found:
                found[key] = self.stage(counts, self.weights(outer, kept=True), last=number == mesh.pipeline - 1)
        parts, collectives = max(found.values(), key=lambda stage: sum(stage[0].values()))
        if mesh.pipeline > 1:
            waits = (mesh.pipeline - 1) / (mesh.virtual * mesh.microbatches)
            parts["pipeline bubble"] = waits * sum(parts.values())
        memory = rank_memory(load, mesh)
        tail, more = self._tail(memory.parameters)
        return ClusterCost(
            gpu=self.gpu,
            links=self.links,
            mesh=mesh,
            workload=load,
            memory=memory,
            collectives=(*collectives, *more),
            parts={name: value for name, value in (parts | tail).items() if value},
            not_coded=load.not_coded(mesh),
        )

    def stage(self, counts: Mapping[int, int], outer: Wire, *, last: bool) -> tuple[dict[str, float], list[Collective]]:
        """Seconds of all microbatches on one stage by what they are spent on, and its collectives.

        `outer`: of the weights outside the blocks, which are gathered before a forward pass and kept for its backward
        pass; their gradients are complete when nothing is left to hide behind.
        """
        m = self.mesh.microbatches
        parts = {**_Pass(), "recomputation": 0.0, "copies of FSDP": 0.0}
        flows = {name: Flow() for name in ("forward", "backward", "gradients", TENSOR, AMAX)}
        for kind, number in counts.items():
            forward, backward = self.blocks[kind]
            wire = self.sends[kind]
            again = self.load.recomputed * forward.total
            behind = backward.total + again
            flows["forward"].add(number * m, wire.gathered, wire.gather, wire.gather - forward.total)
            flows["backward"].add(number * m, wire.gathered_again, wire.again, wire.again - behind)
            hidden = max(0.0, behind - wire.again)
            flows["gradients"].add(number, wire.reduced, wire.reduce, wire.reduce - hidden)
            for seconds in (forward, backward):
                for name, value in seconds.items():
                    parts[name] += number * m * value
                for name, (sent, alone) in seconds.collectives.items():
                    flows[name].add(number * m, sent, alone, seconds[name])
            parts["recomputation"] += number * m * again
            parts["copies of FSDP"] += number * wire.copied / self.bandwidth
        parts["copies of FSDP"] += outer.copied / self.bandwidth
        hidden = math.inf if self.mesh.own_units else 0.0
        flows["forward"].add(m, outer.gathered, outer.gather, outer.gather - hidden)
        flows["gradients"].add(1, outer.reduced, outer.reduce, outer.reduce - hidden)
        if last:
            parts["head and loss"] = m * self._head()
        parts["weight gathers"] = flows["forward"].exposed + flows["backward"].exposed
        parts["gradient reduction"] = flows["gradients"].exposed
        return parts, self._collectives(flows)

    def _collectives(self, flows: Mapping[str, Flow]) -> list[Collective]:
        mesh, groups = self.mesh, self.groups
        found = []
        if mesh.shard > 1:
            found.append(flows["forward"].named("weight gather, forward", groups["shard"].link))
            found.append(flows["backward"].named("weight gather, backward", groups["shard"].link))
        if mesh.data > 1:
            link = "network" if "network" in (groups["shard"].link, groups["replicate"].link) else "NVLink"
            found.append(flows["gradients"].named("gradient reduction", link))
        if mesh.tensor > 1:
            found.append(flows[TENSOR].named("tensor gathers and scatters", groups["tensor"].link))
            found.append(flows[AMAX].named(AMAX, groups["tensor"].link))
        return found

    def _head(self) -> float:
        """Seconds of the layers outside the blocks and of the loss, one microbatch."""
        forward, backward = self.layers(self.load.outside)
        logits = self.tokens * self.load.vocabulary / self.mesh.tensor
        return forward.total + backward.total + LOGIT_BYTES * logits / self.bandwidth

    def _tail(self, parameters: float) -> tuple[dict[str, float], list[Collective]]:
        """What a step takes outside of its microbatches."""
        mesh = self.mesh
        tail = {"optimizer": OPTIMIZER_BYTES * parameters / self.bandwidth}
        more: list[Collective] = []
        if mesh.data > 1:
            tail["first gather, last reduction"] = self.sends[0].gather + self.sends[0].reduce
            if mesh.own_units:
                tail["first gather, last reduction"] += self.weights(self.load.before).gather
            group, counted = self.groups["shard"], 4.0 * len(self.load.order) * len(self.load.kinds[0].plans)
            tail["norm and amax of weights"] = group.reduce_seconds(8) + group.reduce_seconds(counted)
            seconds, sent = tail["norm and amax of weights"], 2 * group.sent(8 + counted)
            flow = Flow(sent=sent, seconds=seconds, exposed=seconds)
            more.append(flow.named("norm and amax of weights", group.link))
        if mesh.pipeline > 1:
            group = self.groups["pipeline"]
            part = entered(self.load.kinds[0].cost, mesh)
            one = group.send_seconds(part)
            tail["pipeline sends"] = 2 * (mesh.pipeline - 1) * one
            count = 2 * mesh.microbatches * mesh.virtual
            flow = Flow(sent=count * part, seconds=count * one, exposed=tail["pipeline sends"])
            more.append(flow.named("pipeline sends", group.link))
        return tail, more
