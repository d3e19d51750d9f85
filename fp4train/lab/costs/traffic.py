"""What ranks of a mesh send each other for one block: its stream between tensor-parallel ranks, its
weights and their gradients between data ranks.

The collectives of tensor parallelism follow from the table of parameters (`ParameterSpec.cut`):

    OUT       forward gathers x, once for the layers that read it; backward gathers it again for
              wgrad, since a rank keeps its tokens only, and scatters dx
    IN        forward scatters the sum y; backward gathers dy
    EXPERTS   forward gathers the router's input and scatters the sum; backward likewise, once for
              all layers of experts of a block

Without sequence parallelism the sums are all-reduced and nothing else is sent. Operands that the
recipe quantises are gathered as codes (`LayerPlan.sources`), but for those of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fp4train.lab.costs.links import NOTHING_SENT, Group, Traffic
from fp4train.lab.costs.weights import ModelWeight, elements
from fp4train.parallel.config import Mesh
from fp4train.parameters import Split
from fp4train.precision.layer_plan import LayerPlan


def tensor_traffic(
    weights: Sequence[ModelWeight], stream: float, mesh: Mesh, group: Group
) -> tuple[Traffic, Traffic]:
    """(Forward, backward) of tensor parallelism in a block and microbatch.

    Args:
        weights: weights of the block.
        stream: bytes of the residual stream in BF16.
    """
    cut = [weight for weight in weights if weight.plan is not None]
    into = [weight.part(mesh) for weight in cut if weight.spec.cut is Split.OUT]
    out = [weight.part(mesh) for weight in cut if weight.spec.cut is Split.IN]
    routed = any(weight.spec.cut is Split.EXPERTS for weight in cut)
    if mesh.tensor == 1 or not (into or out or routed):
        return NOTHING_SENT, NOTHING_SENT
    # Layers of one input gather it once.
    inputs = list({plan.layer.fused or (plan.layer.name,): plan for plan in into}.values())
    summed_in_backward = inputs if mesh.joined else into
    sums = stream if mesh.joined else 2 * stream  # float32
    forward = [sums] * len(out)
    backward = [sums] * len(summed_in_backward)
    if routed:
        forward.append(2 * stream)
        backward.append(2 * stream)
    if mesh.sequence:
        forward += [_sent(stream, plan, "fprop", "x") for plan in inputs]
        backward += [_sent_for_both(stream, plan) for plan in out]
        backward += [_sent(stream, plan, "wgrad", "x") for plan in summed_in_backward]
        if routed:
            forward.append(stream)
            backward.append(stream)
    else:
        forward *= 2
        backward *= 2
    sent_forward = sum(map(group.gather, forward), NOTHING_SENT)
    sent_backward = sum(map(group.gather, backward), NOTHING_SENT)
    return sent_forward, sent_backward


_SIDE: Final = 1 << 12


def _sent(stream: float, plan: LayerPlan, gemm: str, tensor: str) -> float:
    """Bytes of a tensor of `stream` BF16 bytes when it is gathered for a GEMM."""
    operand = plan.sources[gemm, tensor]
    return stream / 2 * operand.bytes(_SIDE, _SIDE, itemsize=2) / _SIDE**2


def _sent_for_both(stream: float, plan: LayerPlan) -> float:
    """Bytes of dy for dgrad and wgrad; one tensor in high precision serves both."""
    operands = [plan.sources[gemm, "dy"] for gemm in ("dgrad", "wgrad")]
    if any(operand.codes is None for operand in operands):
        return stream
    return sum(_sent(stream, plan, gemm, "dy") for gemm in ("dgrad", "wgrad"))


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The weights of a block between ranks.

    Args:
        forward, backward: gathers before the two passes.
        gradients: reduction of their gradients, once per step.
        copied: bytes that FSDP copies per step.
    """

    forward: Traffic
    backward: Traffic
    gradients: Traffic
    copied: float


def weight_traffic(
    weights: Sequence[ModelWeight],
    mesh: Mesh,
    shards: Group,
    replicas: Group,
    *,
    kept: bool = False,
    repeats: bool = False,
) -> Wire:
    """Traffic of gathering weights and reducing their gradients.

    Args:
        kept: whether they stay gathered from forward to backward.
        repeats: whether backward recomputes forward.
    """
    forward = sum(weight.wire_bytes(mesh) for weight in weights)
    backward = 0.0
    if not kept:
        backward = sum(
            weight.wire_bytes(mesh, backward=True, repeats=repeats) for weight in weights
        )
    count = elements(weights, mesh)
    gradients = mesh.reduce_bytes * count
    copied = 2 * (mesh.microbatches * (forward + backward) + gradients)
    return Wire(
        forward=shards.gather(forward),
        backward=shards.gather(backward),
        gradients=shards.gather(gradients) + replicas.reduce(4 * count / mesh.shard),
        copied=copied if mesh.shard > 1 else 0.0,
    )
