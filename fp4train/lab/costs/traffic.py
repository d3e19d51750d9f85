"""What ranks of a mesh send each other for one block: its stream between tensor-parallel ranks, its
weights and their gradients between data ranks."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fp4train.lab.costs.links import NOTHING_SENT, Group, Traffic
from fp4train.lab.costs.quantising import needs_amax
from fp4train.lab.costs.weights import ModelWeight
from fp4train.lab.costs.workload import Kind
from fp4train.parallel.config import Mesh
from fp4train.quantize import Operand, QuantSpec, packed_bytes

TENSOR: Final = "tensor collectives"
AMAX: Final = "amax over tensor ranks"
"""What the seconds between tensor-parallel ranks are spent on."""


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


def tensor_traffic(
    kind: Kind, row_layers: Collection[str], mesh: Mesh, group: Group
) -> tuple[dict[str, Traffic], dict[str, Traffic]]:
    """(Forward, backward) of tensor parallelism in a block and microbatch.

    Forward gathers the inputs of column-wise layers and scatters the sums of row-wise ones;
    backward gathers their dy, scatters dx, and gathers x again for wgrad, since a rank keeps its
    tokens only. Without sequence parallelism the sums are all-reduced and nothing else is sent.
    Of routed experts the input of the router, dy, and both sums are sent, once for all layers;
    their operands are not quantised before.
    """
    plans = [plan for plan in kind.plans if not plan.layer.experts]
    row_wise = [plan for plan in plans if plan.layer.name in row_layers]
    column_wise = [plan for plan in plans if plan.layer.name not in row_layers]
    if mesh.tensor == 1 or not row_wise:
        return {}, {}
    routed = len(plans) < len(kind.plans)
    stream = kind.cost.input / mesh.context
    sums = stream if mesh.joined else 2 * stream
    # Layers come in as many groups of one input as there are sums.
    gathered = column_wise[: len(row_wise)]
    again = gathered if mesh.joined else column_wise
    forward = [sums] * len(row_wise)
    backward = [sums] * len(again)
    if mesh.sequence:
        forward += [_sent(stream, plan.fprop.operands.first) for plan in gathered]
        backward += [
            _sent_twice(stream, plan.dgrad.operands.first, plan.wgrad.operands.first)
            for plan in row_wise
        ]
        backward += [_sent(stream, _spec_of_codes(plan.sources["wgrad", "x"])) for plan in again]
    else:
        forward *= 2
        backward *= 2
    if routed:
        if mesh.sequence:
            of_experts = [stream, 2 * stream]
        else:
            of_experts = [2 * stream, 2 * stream]
        forward += of_experts
        backward += of_experts
    operands_forward = [plan.fprop.operands.first for plan in plans]
    operands_backward = [plan.dgrad.operands.first for plan in plans]
    return (
        _tensor_pass(forward, operands_forward, group),
        _tensor_pass(backward, operands_backward, group),
    )


def _tensor_pass(
    sizes: Iterable[float],
    operands: Iterable[QuantSpec | None],
    group: Group,
) -> dict[str, Traffic]:
    """Gathers of so many bytes each, and the amaxes of operands that ranks share."""
    shared = sum(spec is not None and needs_amax(spec) for spec in operands)
    amaxes = Traffic(shared * group.gather(8).sent, shared * group.reduce(0.0).seconds)
    return {TENSOR: sum(map(group.gather, sizes), NOTHING_SENT), AMAX: amaxes}


def _spec_of_codes(operand: Operand) -> QuantSpec | None:
    """The spec of the codes that an operand is, or has the values of; None: it has none."""
    return None if operand.codes is None else operand.codes.spec


def _sent(stream: float, spec: QuantSpec | None) -> float:
    """Bytes of a tensor of `stream` BF16 bytes when it is gathered, as codes if it is quantised."""
    if spec is None:
        return stream
    side = 1 << 12
    return stream / 2 * packed_bytes(spec, side, side) / side**2


def _sent_twice(stream: float, row: QuantSpec | None, column: QuantSpec | None) -> float:
    """Bytes of both forms of a tensor; one tensor in high precision serves both."""
    if row is None or column is None:
        return stream
    return _sent(stream, row) + _sent(stream, column)


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
    elements = sum(weight.of_rank(mesh) for weight in weights)
    gradients = mesh.reduce_bytes * elements
    copied = 2 * (mesh.microbatches * (forward + backward) + gradients)
    return Wire(
        forward=shards.gather(forward),
        backward=shards.gather(backward),
        gradients=shards.gather(gradients) + replicas.reduce(4 * elements / mesh.shard),
        copied=copied if mesh.shard > 1 else 0.0,
    )
