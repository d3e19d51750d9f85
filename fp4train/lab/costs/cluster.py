"""The cost of training a model on a mesh of GPUs: memory of a rank, collectives by link, seconds of
a step, tokens/s.

One stage and microbatch take the sum over its blocks of

    forward    max(GEMMs + quantising + attention + elementwise + tensor collectives, weight gather)
    backward   max(the same of backward + what is recomputed, weight gather [+ gradient scatter])

FSDP copies what it gathers into the weights and gradients into what it scatters, a read and a write
of each. The gathers and scatters of weights hide behind the block that runs, those of embedding and
head behind nothing; the collectives of tensor parallelism do not hide, unless `hides_tensor`.
Gradients are reduced in the last microbatch only. A step is

    (m + (p−1)/v) · slowest stage + sends that fill the pipeline + optimizer

and no less than the host takes to queue its kernels; recorded steps have none.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fp4train.hardware import Gpu
from fp4train.lab.costs.blocks import PassWork
from fp4train.lab.costs.host import OPERATION, host_seconds
from fp4train.lab.costs.links import INTERCONNECTS, Collective, Group, Traffic
from fp4train.lab.costs.memory import USABLE, entered, rank_memory
from fp4train.lab.costs.roofline import COPY, sustained
from fp4train.lab.costs.rows import layer_costs
from fp4train.lab.costs.traffic import tensor_traffic
from fp4train.lab.costs.weights import ModelWeight, elements
from fp4train.lab.costs.workload import Kind, Workload
from fp4train.models.common.liger import MOVED
from fp4train.models.common.loss import chunk_rows
from fp4train.parallel.config import Mesh

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

CAST: Final = 6
"""Bytes per weight of a cast between float32 and BF16: once per step of a weight that no GEMM
quantises and no shard sends, and of the gradient of each weight. Products add those of further
microbatches in float32."""

OPTIMIZER_BYTES: Final[Mapping[float, float]] = {8: 36, 4: 24}
"""Bytes moved per parameter and step, by those of the moments: the norm reads the gradient, AdamW
reads weight, moments and gradient and writes weight and moments; torch's writes the clipped
gradient, too."""

OTHER_OPTIMIZERS_BYTES: Final = 20
"""Bytes moved per parameter and step by other optimizers, beside the moments: as by torch's AdamW."""

HEAD_BYTES: Final = 6 + 8
"""Bytes moved per weight of the head and microbatch: it is rounded for the loss, and its gradient
scaled after it."""

EMBEDDED: Final = 32
LAST_NORM: Final = 10
LOSS_OF_HIDDEN: Final = 8
"""Bytes per element of the residual stream that the embedding, the norm before the head, and the
loss move. The embedding looks up float32 rows and rounds them (14), and adds float32 gradients to
rows (18); the loss puts the gradient of a chunk of tokens in its place, and scales it."""

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
TENSOR = "tensor collectives"
SENDS = "pipeline sends"
"""What the seconds between ranks are spent on."""

Seconds = dict[str, float]
"""Seconds by what they are spent on."""


@dataclass(frozen=True)
class BlockPass:
    """A block's forward or backward pass of a microbatch.

    Args:
        seconds: seconds by what they are spent on.
        stream: traffic between tensor-parallel ranks.
    """

    seconds: Seconds
    stream: Traffic

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class ClusterCost:
    """Memory, traffic and seconds of a mesh in one stretch of a run.

    Args:
        workload: a microbatch of the run.
        gpu: hardware of the ranks of `mesh`, in the machine that it is sold in.
    """

    def __init__(self, workload: Workload, gpu: Gpu, mesh: Mesh) -> None:
        self.workload = workload
        self.gpu = gpu
        self.links = INTERCONNECTS[gpu.name]
        self.mesh = mesh
        self.memory = rank_memory(workload, mesh)
        self._tokens = workload.tokens // mesh.context
        self._copy = gpu.bandwidth * COPY
        self._blocks = [self._block(kind) for kind in workload.kinds]
        stages = [self._stage(*stage) for stage in enumerate(workload.stages(mesh))]
        parts, collectives = max(stages, key=lambda stage: sum(stage[0].values()))
        if mesh.pipeline > 1:
            waits = (mesh.pipeline - 1) / (mesh.virtual * mesh.microbatches)
            parts["pipeline bubble"] = waits * sum(parts.values())
        moments = workload.execution.moment_bytes
        moved = OPTIMIZER_BYTES.get(moments, OTHER_OPTIMIZERS_BYTES + 2 * moments)
        parts["optimizer"] = moved * self.memory.parameters / self._copy
        if mesh.pipeline > 1:
            sends = self._sends()
            parts[SENDS] = sends.exposed
            collectives.append(sends)
        self.host = self._host()
        """Seconds that the host takes to queue a step."""
        parts["waiting for the host"] = max(0.0, self.host - sum(parts.values()))
        self.parts: Mapping[str, float] = {name: value for name, value in parts.items() if value}
        """Seconds of a step by what they are spent on; they add up to the step."""
        self.collectives = tuple(collectives)

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

    def _group(self, kind: str) -> Group:
        return Group.along(self.mesh, kind, self.links)

    # -- one block ---------------------------------------------------------------------------------

    def _layers(
        self, weights: Iterable[ModelWeight], tokens: int, calls: float = 1
    ) -> tuple[Seconds, Seconds]:
        """(Forward, backward) of linear layers in so many calls of so many tokens."""
        forward: Seconds = {GEMM: 0.0, QUANTISING: 0.0}
        backward: Seconds = {GEMM: 0.0, QUANTISING: 0.0}
        for weight in weights:
            form = weight.wire(self.mesh)
            passes = 1.0
            weight_bytes = 4
            if self.mesh.shard == 1:
                passes = 1 / self.mesh.microbatches
            elif form.coded:
                passes = 1 / (self.mesh.shard * self.mesh.microbatches)
            elif form.dtype == torch.bfloat16:
                weight_bytes = 2
            rows = layer_costs(
                weight.part(self.mesh),
                self.gpu,
                tokens,
                calls,
                weight_passes=passes,
                weight_bytes=weight_bytes,
            )
            for row in rows:
                seconds = forward if row.gemm_name == "fprop" else backward
                seconds[GEMM] += row.gemm / sustained(self.gpu)
                seconds[QUANTISING] += row.quantise
        return forward, backward

    def _block(self, kind: Kind) -> tuple[BlockPass, BlockPass]:
        """(Forward, backward) of a block and microbatch."""
        forward, backward = self._layers(kind.layers, self._tokens)
        forward |= self._between_products(kind.cost.forward, ATTENTION_FORWARD)
        backward |= self._between_products(kind.cost.backward, ATTENTION_BACKWARD)
        stream = kind.cost.input / self.mesh.context
        traffic = tensor_traffic(kind.weights, stream, self.mesh, self._group("tensor"))
        passes = BlockPass(forward, traffic[0]), BlockPass(backward, traffic[1])
        for block_pass in passes:
            hidden = block_pass.seconds[GEMM] if self.mesh.hides_tensor else 0.0
            block_pass.seconds[TENSOR] = max(0.0, block_pass.stream.seconds - hidden)
        return passes

    def _between_products(self, work: PassWork, attention_share: float) -> Seconds:
        """Attention, and the operations between the products: by their bytes or their
        arithmetic.
        """
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

    def _cast_seconds(self, kind: Kind) -> float:
        """Seconds per step of casts of a block's weights and of their gradients."""
        moved = 0.0
        for weight in kind.layers:
            rounded = self.mesh.shard == 1 and not weight.code_bytes(self.mesh)
            moved += CAST * (1 + rounded) * weight.of_rank(self.mesh)
        return moved / self._copy

    # -- the step ----------------------------------------------------------------------------------

    def _stage(self, number: int, counts: Counter[int]) -> tuple[Seconds, list[Collective]]:
        """Seconds of all microbatches on one stage, and its collectives.

        Weights outside the blocks are gathered before a forward pass and kept for its backward
        pass; their gradients are complete when nothing is left to hide behind.
        """
        mesh = self.mesh
        m = mesh.microbatches
        parts: defaultdict[str, float] = defaultdict(float)
        flows = self._flows()
        for index, times in counts.items():
            kind = self.workload.kinds[index]
            for block_pass in self._blocks[index]:
                for name, seconds in block_pass.seconds.items():
                    parts[name] += times * m * seconds
                flows[TENSOR].add(times * m, block_pass.stream, block_pass.seconds[TENSOR])
            forward, backward = (block_pass.total for block_pass in self._blocks[index])
            again = self.workload.execution.recomputed * forward
            parts[AGAIN] += times * m * again
            parts[COPIES] += times * self._send(
                kind.weights, times, flows, forward, backward + again
            )
            parts[CASTS] += times * self._cast_seconds(kind)
        parts[COPIES] += self._send(self.workload.outer(number, mesh), 1, flows)
        if number == 0:
            parts[ELEMENTWISE] += m * self._stream_seconds(EMBEDDED)
        if number == mesh.pipeline - 1:
            parts[ELEMENTWISE] += m * self._stream_seconds(LAST_NORM)
            parts[HEAD] = m * self._head()
            parts[LOSS] = m * self._loss()
            head = elements(self.workload.head, mesh)
            parts[CASTS] += m * HEAD_BYTES * head / self._copy
        parts[GATHERS] = flows[FORWARD].exposed + flows[BACKWARD].exposed
        parts[GRADIENTS] = flows[GRADIENTS].exposed
        ranks = {FORWARD: mesh.shard, BACKWARD: mesh.shard, GRADIENTS: mesh.data}
        shown = [flow for name, flow in flows.items() if ranks.get(name, mesh.tensor) > 1]
        return dict(parts), shown

    def _flows(self) -> dict[str, Collective]:
        """The collectives of a stage, of which nothing is sent yet, in the order of their list."""
        shard = self._group("shard").link
        tensor = self._group("tensor").link
        data = max(shard, self._group("replicate").link, key=["NVLink", "network"].index)
        return {
            FORWARD: Collective(name=FORWARD, link=shard),
            BACKWARD: Collective(name=BACKWARD, link=shard),
            GRADIENTS: Collective(name=GRADIENTS, link=data),
            TENSOR: Collective(name="tensor gathers and scatters", link=tensor),
        }

    def _send(
        self,
        weights: Sequence[ModelWeight],
        times: int,
        flows: Mapping[str, Collective],
        forward: float = 0.0,
        backward: float | None = None,
    ) -> float:
        """Add the gathers of weights, and the reduction of their gradients, to `flows`; returns the
        seconds per step that FSDP copies, once.

        Args:
            times: number of such groups of weights.
            forward, backward: seconds of the passes that hide them; None: what is gathered for
                forward is kept for backward.
        """
        mesh = self.mesh
        shards = self._group("shard")
        repeats = self.workload.execution.recomputed > 0
        count = elements(weights, mesh)
        reduced = shards.gather(mesh.reduce_bytes * count)
        reduced += self._group("replicate").reduce(4 * count / mesh.shard)
        size = sum(weight.wire_bytes(mesh) for weight in weights)
        gathered = shards.gather(size)
        flows[FORWARD].add(times * mesh.microbatches, gathered, gathered.seconds - forward)
        if backward is not None:
            again = sum(w.wire_bytes(mesh, backward=True, repeats=repeats) for w in weights)
            size += again
            gathered = shards.gather(again)
            flows[BACKWARD].add(times * mesh.microbatches, gathered, gathered.seconds - backward)
            backward -= gathered.seconds
        flows[GRADIENTS].add(times, reduced, reduced.seconds - max(0.0, backward or 0.0))
        if mesh.shard == 1:
            return 0.0
        return 2 * (mesh.microbatches * size + mesh.reduce_bytes * count) / self._copy

    def _head(self) -> float:
        """Seconds of the layers outside the blocks, one microbatch. The loss multiplies the head
        for a chunk of the tokens at a time.
        """
        chunk = min(self._tokens, chunk_rows("cuda", max(1, self.workload.vocabulary)))
        passes = self._layers(self.workload.head, chunk, self._tokens / chunk)
        return sum(value for seconds in passes for value in seconds.values())

    def _loss(self) -> float:
        """Seconds of the loss of one microbatch."""
        execution = self.workload.execution
        logit_bytes = execution.logit_bytes
        if execution.liger and self.mesh.tensor == 1:
            logit_bytes = MOVED["cross_entropy"][0]
        logits = self._tokens * self.workload.vocabulary / self.mesh.tensor
        return logit_bytes * logits / self._copy + self._stream_seconds(LOSS_OF_HIDDEN)

    def _stream_seconds(self, moved: float) -> float:
        """Seconds of passes that move so many bytes per element of the residual stream, in BF16."""
        return moved * entered(self.workload.kinds[0].cost, self.mesh) / 2 / self._copy

    def _host(self) -> float:
        """Seconds to queue a step: those of the rank with most blocks."""
        execution = self.workload.execution
        if execution.recorded:
            return 0.0
        share = FUSED if execution.compiled else 1.0
        by_kind = []
        for kind in self.workload.kinds:
            launches = kind.cost.forward.launches + kind.cost.backward.launches
            layers = sum(host_seconds(w.part(self.mesh), self._tokens) for w in kind.layers)
            eager = share * OPERATION * launches + layers
            by_kind.append((1 + execution.recomputed / 3) * eager)
        stages = [
            sum(number * by_kind[kind] for kind, number in counts.items())
            for counts in self.workload.stages(self.mesh)
        ]
        return self.mesh.microbatches * max(stages, default=0.0)

    def _sends(self) -> Collective:
        """What a stage sends to the next and to the one before it; those that fill the pipeline and
        empty it are not hidden.
        """
        stages = self._group("pipeline")
        traffic = stages.send(entered(self.workload.kinds[0].cost, self.mesh))
        exposed = 2 * (self.mesh.pipeline - 1) * traffic.seconds
        sends = Collective(name=SENDS, link=stages.link, exposed=exposed)
        sends.add(2 * self.mesh.microbatches * self.mesh.virtual, traffic, 0.0)
        return sends
