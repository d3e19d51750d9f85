"""The cost of training a model on a mesh of GPUs: memory of a rank, collectives by link, seconds of a step, tokens/s.

One stage and microbatch take the sum over its blocks of

    forward    max(GEMMs + quantising + attention + elementwise + tensor collectives, weight gather)
    backward   max(the same of backward + what is recomputed,                        weight gather [+ gradient scatter])

FSDP copies what it gathers into the weights and gradients into what it scatters, a read and a write of each. The
gathers and scatters of weights hide behind the block that runs, those of embedding and head behind nothing; the
collectives of tensor parallelism do not, unless `hides_tensor`. Gradients are reduced in the last microbatch only. A
step is

    (m + (p−1)/v) · slowest stage + first gather + last scatter + sends that fill the pipeline + norm + optimizer

and no less than the host takes to queue its kernels; recorded steps have none.

GEMMs and quantising: `estimate.py`. Passes over weights and gradients beside them, the optimizer's among them, over
embedded rows and over what the head reads: `casts.py`. Parameters of the rest:
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fp4train.hardware import Gpu
from fp4train.lab.costs import casts
from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.estimate import layer_costs
from fp4train.lab.costs.host import OPERATION, host_seconds
from fp4train.lab.costs.links import Collective, Group, Interconnect, Traffic
from fp4train.lab.costs.memory import USABLE, entered, rank_memory
from fp4train.lab.costs.roofline import COPY, needs_amax
from fp4train.lab.costs.workload import Kind, ModelWeight, Workload
from fp4train.models.common.liger import MOVED
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh
from fp4train.precision.gather import wire_form
from fp4train.precision.layer_plan import LayerPlan, part_of
from fp4train.quantize import QuantSpec, packed_bytes

ATTENTION: Final = (0.60, 0.50)
"""Share of the BF16 peak that attention reaches forward and backward: FlashAttention-3 on H100, causal, head dimension
128, 8 k tokens (arXiv:2407.08608, figures 5 and 6: near 600 and 550 of 989 TFLOP/s). Other GPUs: assumed equal."""

SUSTAINED: Final = 0.82
"""Rate of products in training over that of a short benchmark: clocks fall under a long load. Transformer Engine's
benchmark on B300 reaches 0.72 of the BF16 peak where short ones on H200 and B200 reach 0.88 (`roofline.gemm_share`):
0.72 / 0.88 = 0.82. Rates of B300 and GB300 come from that benchmark and are not lowered again."""

FUSED: Final = 0.5
"""Share of the bytes counted between GEMMs that compiled blocks move, at the speed of a copy: assumed, chains of two
operations become one."""

EAGER: Final = 0.315
"""Speed of torch's operators between GEMMs over that of a copy, where each is a kernel by itself. Calibrated: the least
squares of the logarithms of three published eager steps, which ask for 0.27 (torchtitan on H100), 0.36 and 0.34
(arXiv:2610.00053). It stands for all that other people's eager code takes beyond the bytes counted here: kernels
slower than a copy, gaps between them, norms and rotations in float32."""

BACKWARD_ATTENTION: Final = 2.5
"""FLOP of attention's backward over those of its forward: five products instead of two."""


GEMM, QUANTISING, ATTENDING, ELEMENTWISE = "GEMMs", "quantising", "attention", "elementwise"
HEAD, LOSS, CASTS = "GEMMs of the head", "loss", "casts, gradient sums"
TENSOR, AMAX = "tensor collectives", "amax over tensor ranks"
"""Names of what the seconds of a block are spent on."""


FORWARD, BACKWARD, GRADIENTS = "weight gather, forward", "weight gather, backward", "gradient reduction"
SENDS, NORMS = "pipeline sends", "norm and amax of weights"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The weights of a block: gathered for its forward pass, again for its backward pass, their gradients reduced; and
    the bytes that FSDP copies."""

    gather: Traffic
    again: Traffic
    reduce: Traffic
    copied: float


class _Pass(dict[str, float]):
    """Seconds of one block and microbatch on a rank, forward or backward, by what they are spent on.

    `collectives`: those of TENSOR and AMAX alone.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((GEMM, QUANTISING, ATTENDING, ELEMENTWISE, TENSOR, AMAX), 0.0))
        self.collectives = {TENSOR: Traffic(), AMAX: Traffic()}

    @property
    def total(self) -> float:
        return sum(self.values())


class ClusterCost:
    """Memory, traffic and seconds of a mesh in one stretch of a run.

    Args:
        workload: one step of it. gpu, links: of the ranks of `mesh`.
    """

    def __init__(self, workload: Workload, gpu: Gpu, links: Interconnect, mesh: Mesh) -> None:
        self.workload, self.gpu, self.links, self.mesh = workload, gpu, links, mesh
        self.memory, self.not_coded = rank_memory(workload, mesh), workload.not_coded(mesh)
        self._tokens = workload.tokens // mesh.context
        self._groups = {kind: Group.along(mesh, kind, links) for kind in ("tensor", "shard", "replicate", "pipeline")}
        self._bandwidth = gpu.bandwidth * COPY
        self._rate = SUSTAINED if gpu.capability != (10, 3) else 1.0
        self._blocks = [self._block(kind) for kind in workload.kinds]
        self._sends = [self._weights(kind.weights) for kind in workload.kinds]
        parts, collectives = self._slowest_stage()
        tail, more = self._tail()
        self.parts: Mapping[str, float] = {name: value for name, value in (parts | tail).items() if value}
        """Seconds of a step by what they are spent on; they add up to the step."""
        self.host = self._host()
        """Seconds that the host takes to queue a step."""
        if (waits := self.host - sum(self.parts.values())) > 0:
            self.parts = {**self.parts, "waiting for the host": waits}
        self.collectives = (*collectives, *more)

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

    # -- one block ----------------------------------------------------------------------------------------------------

    def _split(self, plan: LayerPlan) -> LayerPlan:
        """The part of a layer that a rank multiplies."""
        name = plan.layer.name
        cut = "in" if name in self.workload.row_wise else "out"
        return part_of(plan, cut, self.mesh.tensor, self.workload.segments.get(name, ()))

    def _layers(self, plans: Sequence[LayerPlan], tokens: int, calls: int = 1) -> tuple[_Pass, _Pass]:
        """GEMMs and quantising of linear layers, in so many calls of so many tokens."""
        forward, backward = _Pass(), _Pass()
        split = {plan.layer.name: self._split(plan) for plan in plans}
        for mine in split.values():
            form = wire_form(mine, self.mesh.shard, self.mesh.gather)
            again = mine.dgrad.operands.second
            # What is requantised from codes is whole on every rank, and freed after each pass.
            parts = form.coded and (again is None or again.requantises is None)
            shared = self.mesh.shard * self.mesh.microbatches if parts else 1
            passes = 1 / (shared if self.mesh.shard > 1 else self.mesh.microbatches)
            whole: Any = {"weight_passes": passes}
            in_bf16 = self.mesh.own_units or (self.mesh.shard > 1 and not form.coded and form.dtype == torch.bfloat16)
            whole |= {"others": split, "made": self.workload.made, "sharing": not self.workload.compiled}
            for row in layer_costs(mine, self.gpu, tokens, calls, weight_bytes=2 if in_bf16 else 4, **whole):
                into = forward if row.gemm_name == "fprop" else backward
                into[GEMM] += row.gemm / self._rate
                into[QUANTISING] += row.quantise
        return forward, backward

    def _block(self, kind: Kind) -> tuple[_Pass, _Pass]:
        """(forward, backward) of a block and microbatch."""
        cost, plans = kind.cost, kind.plans
        forward, backward = self._layers(plans, self._tokens)
        cut, peak = self.mesh.tensor * self.mesh.context, self.gpu.peaks["BF16"]
        flops = sum(a.flops for a in cost.attentions) / cut / self._rate
        for seconds, products, share, moved, kernels, computed in (
            (forward, 1.0, ATTENTION[0], cost.forward, cost.fused_forward, cost.forward_flops),
            (backward, BACKWARD_ATTENTION, ATTENTION[1], cost.backward, cost.fused_backward, cost.backward_flops),
        ):
            seconds[ATTENDING] = products * flops / (peak * share)
            arithmetic = computed / cut / self._rate / self.gpu.peaks["FP32"]
            moved = FUSED * (moved + kernels) if self.workload.compiled else moved / EAGER + kernels
            seconds[ELEMENTWISE] = max(moved / cut / self._bandwidth, arithmetic)
        self._tensor(cost, plans, forward, backward)
        return forward, backward

    def _tensor(self, cost: BlockCost, plans: Sequence[LayerPlan], forward: _Pass, backward: _Pass) -> None:
        """Adds the collectives of tensor parallelism.

        Forward gathers the inputs of column-wise layers and scatters the sums of row-wise ones; backward gathers their
        dy, scatters dx, and gathers x again for wgrad, since a rank keeps its tokens only. Without sequence parallelism
        the sums are all-reduced and nothing else is sent. Of routed experts the input of the router, dy, and both sums
        are sent, once for all layers; their operands are not quantised before.
        """
        mesh, group = self.mesh, self._groups["tensor"]
        routed = any(p.layer.experts for p in plans)
        plans = [p for p in plans if not p.layer.experts]
        rows = [p for p in plans if p.layer.name in self.workload.row_wise]
        columns = [p for p in plans if p.layer.name not in self.workload.row_wise]
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
            more = [whole, 2 * whole] * routed
        else:
            sizes = ([sums] * 2 * len(rows), [sums] * 2 * len(split))
            more = [2 * whole] * 2 * routed
        operands = ([p.fprop.operands.first for p in plans], [p.dgrad.operands.first for p in plans])
        for seconds, sent, quantised in zip((forward, backward), sizes, operands, strict=True):
            alone = seconds.collectives[TENSOR] = sum(map(group.gather, [*sent, *more]), Traffic())
            seconds[TENSOR] = max(0.0, alone.seconds - seconds[GEMM]) if mesh.hides_tensor else alone.seconds
            # The scale of an operand may need the amax of the whole tensor, over all ranks that share it.
            amaxes = sum(spec is not None and needs_amax(spec) for spec in quantised)
            seconds[AMAX] = group.reduce(0.0).seconds * amaxes
            seconds.collectives[AMAX] = Traffic(amaxes * group.gather(8).sent, seconds[AMAX])

    def _form(self, whole: float, spec: QuantSpec | None) -> float:
        """Bytes of an activation of `whole` BF16 bytes when it is gathered, as codes if it is quantised."""
        if spec is None or not self.mesh.codes:
            return whole
        side = 1 << 12
        return whole / 2 * packed_bytes(spec, side, side) / side**2

    def _forms(self, whole: float, row: QuantSpec | None, column: QuantSpec | None) -> float:
        """Bytes of both forms of a tensor; one tensor in high precision serves both."""
        if row is None or column is None or not self.mesh.codes:
            return whole
        return self._form(whole, row) + self._form(whole, column)

    def _weights(self, weights: Sequence[ModelWeight], *, kept: bool = False) -> Wire:
        """Traffic of gathering weights and of reducing their gradients; `kept`: they stay from forward to backward."""
        wire = sum(weight.wire_bytes(self.mesh) for weight in weights)
        repeats = self.workload.recomputed > 0
        backward = () if kept else weights
        again = sum(weight.wire_bytes(self.mesh, backward=True, repeats=repeats) for weight in backward)
        elements = sum(weight.of_rank(self.mesh) for weight in weights)
        gradient = self.mesh.reduce_bytes * elements
        shard, replicas = self._groups["shard"], self._groups["replicate"]
        return Wire(
            gather=shard.gather(wire),
            again=shard.gather(again),
            reduce=shard.gather(gradient) + replicas.reduce(4 * elements / self.mesh.shard),
            copied=2 * (self.mesh.microbatches * (wire + again) + gradient) if self.mesh.shard > 1 else 0.0,
        )

    # -- the step -----------------------------------------------------------------------------------------------------

    def _slowest_stage(self) -> tuple[dict[str, float], list[Collective]]:
        """Seconds of all microbatches with the bubble of the pipeline, and the collectives."""
        mesh, load = self.mesh, self.workload
        found = {}
        for number, counts in enumerate(load.stages(mesh)):
            outer = load.outer(number, mesh)
            key = (*sorted(counts.items()), number == mesh.pipeline - 1, *(weight.name for weight in outer))
            if key not in found:
                ends = number == 0, number == mesh.pipeline - 1
                found[key] = self._stage(counts, self._weights(outer, kept=True), *ends)
        parts, collectives = max(found.values(), key=lambda stage: sum(stage[0].values()))
        if mesh.pipeline > 1:
            waits = (mesh.pipeline - 1) / (mesh.virtual * mesh.microbatches)
            parts["pipeline bubble"] = waits * sum(parts.values())
        return parts, collectives

    def _stage(
        self, counts: Mapping[int, int], outer: Wire, first: bool, last: bool
    ) -> tuple[dict[str, float], list[Collective]]:
        """Seconds of all microbatches on one stage by what they are spent on, and its collectives.

        `outer`: of the weights outside the blocks, which are gathered before a forward pass and kept for its backward
        pass; their gradients are complete when nothing is left to hide behind. `first`, `last`: stages of a pipeline.
        """
        m = self.mesh.microbatches
        parts = {**_Pass(), "recomputation": 0.0, CASTS: 0.0, "copies of FSDP": 0.0}
        flows = self._flows()
        for index, number in counts.items():
            kind = self.workload.kinds[index]
            forward, backward = self._blocks[index]
            wire = self._sends[index]
            again = self.workload.recomputed * forward.total
            behind = backward.total + again
            hidden = max(0.0, behind - wire.again.seconds)
            flows[FORWARD].add(number * m, wire.gather, wire.gather.seconds - forward.total)
            flows[BACKWARD].add(number * m, wire.again, wire.again.seconds - behind)
            flows[GRADIENTS].add(number, wire.reduce, wire.reduce.seconds - hidden)
            for seconds in (forward, backward):
                for name, value in seconds.items():
                    parts[name] += number * m * value
                for name, alone in seconds.collectives.items():
                    flows[name].add(number * m, alone, seconds[name])
            parts["recomputation"] += number * m * again
            parts["copies of FSDP"] += number * wire.copied / self._bandwidth
            cast = sum(casts.of_block(weight, self.workload, self.mesh) for weight in kind.weights)
            parts[CASTS] += number * cast / self._bandwidth
        parts[CASTS] += casts.of_ends(self.workload, self.mesh, first=first, last=last) / self._bandwidth
        parts["copies of FSDP"] += outer.copied / self._bandwidth
        hidden = math.inf if self.mesh.own_units else 0.0
        flows[FORWARD].add(m, outer.gather, outer.gather.seconds - hidden)
        flows[GRADIENTS].add(1, outer.reduce, outer.reduce.seconds - hidden)
        if first:
            parts[ELEMENTWISE] += m * self._of_residual(casts.EMBEDDED)
        if last:
            parts[HEAD], parts[LOSS] = (m * seconds for seconds in self._head())
            parts[ELEMENTWISE] += m * self._of_residual(casts.LAST_NORM)
        parts["weight gathers"] = flows[FORWARD].exposed + flows[BACKWARD].exposed
        parts["gradient reduction"] = flows[GRADIENTS].exposed
        sizes = {FORWARD: self.mesh.shard, BACKWARD: self.mesh.shard, GRADIENTS: self.mesh.data}
        return parts, [flow for name, flow in flows.items() if sizes.get(name, self.mesh.tensor) > 1]

    def _flows(self) -> dict[str, Collective]:
        """The collectives of a stage, of which nothing is sent yet, in the order in which they are listed."""
        shard, tensor = self._groups["shard"].link, self._groups["tensor"].link
        both = "network" if "network" in (shard, self._groups["replicate"].link) else "NVLink"
        links = {FORWARD: shard, BACKWARD: shard, GRADIENTS: both, TENSOR: tensor, AMAX: tensor}
        names = {TENSOR: "tensor gathers and scatters"}
        return {each: Collective(name=names.get(each, each), link=link) for each, link in links.items()}

    def _host(self) -> float:
        """Seconds to queue a step: that of the rank with most blocks."""
        load, m = self.workload, self.mesh.microbatches
        if load.recorded:
            return 0.0
        share = FUSED if load.compiled else 1.0
        seconds = []
        for kind in load.kinds:
            layers = sum(host_seconds(self._split(plan), self._tokens) for plan in kind.plans)
            eager = share * OPERATION * kind.cost.operations + layers
            seconds.append((1 + load.recomputed / 3) * eager)
        stages = (sum(number * seconds[kind] for kind, number in counts.items()) for counts in load.stages(self.mesh))
        return m * max(stages, default=0.0)

    def _head(self) -> tuple[float, float]:
        """Seconds of the layers outside the blocks, and of the loss, one microbatch."""
        load, tensors, seconds = self.workload, self.mesh.tensor, 0.0
        # The loss has the head's products, a chunk at a time.
        most = self._tokens if self.mesh.own_units else min(self._tokens, chunk_rows("cuda", load.vocabulary))
        for plan in load.outside:
            rows = most if plan.layer.out_features == load.vocabulary and not plan.quantised else self._tokens
            for tokens, calls in ((rows, self._tokens // rows), (self._tokens % rows, 1)):
                seconds += sum(each.total for each in self._layers([plan], tokens, calls)) if tokens else 0.0
        each = MOVED["cross_entropy"][0] if load.liger and tensors == 1 else load.logit_bytes
        logits = each * self._tokens * load.vocabulary / tensors / self._bandwidth
        return seconds, logits + self._of_residual(casts.LOSS_OF_HIDDEN)

    def _of_residual(self, each: float) -> float:
        """Seconds of passes outside the blocks that move so many bytes per element of the residual stream."""
        if self.mesh.own_units:
            return 0.0
        return each * entered(self.workload.kinds[0].cost, self.mesh) / 2 / self._bandwidth

    def _tail(self) -> tuple[dict[str, float], list[Collective]]:
        """Seconds of a step outside of its microbatches."""
        mesh = self.mesh
        moved = casts.of_optimizer(self.workload) * self.memory.parameters
        tail = {"optimizer": moved / self._bandwidth}
        more: list[Collective] = []
        if mesh.data > 1:
            ends = [self._sends[0].gather, self._sends[0].reduce]
            ends += [self._weights(self.workload.before).gather] if mesh.own_units else []
            tail["first gather, last reduction"] = sum(each.seconds for each in ends)
            group, counted = self._groups["shard"], 4.0 * len(self.workload.order) * len(self.workload.kinds[0].plans)
            tail[NORMS] = group.reduce(8).seconds + group.reduce(counted).seconds
            more.append(Collective(name=NORMS, link=group.link))
            more[-1].add(1, Traffic(group.reduce(8 + counted).sent, tail[NORMS]), tail[NORMS])
        if mesh.pipeline > 1:
            group = self._groups["pipeline"]
            each = group.send(entered(self.workload.kinds[0].cost, mesh))
            tail[SENDS] = 2 * (mesh.pipeline - 1) * each.seconds
            more.append(Collective(name=SENDS, link=group.link, exposed=tail[SENDS]))
            more[-1].add(2 * mesh.microbatches * mesh.virtual, each, 0.0)
        return tail, more
