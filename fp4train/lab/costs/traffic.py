"""What tensor-parallel ranks send each other of the stream of one block.

The collectives follow from the table of parameters (`ParameterSpec.cut`):

    OUT       forward gathers x, once for the layers that read it; backward gathers it again for
              wgrad, since a rank keeps its tokens only, and scatters dx
    IN        forward scatters the sum y; backward gathers dy
    EXPERTS   forward gathers the router's input and scatters the sum; backward likewise, once for
              all layers of experts of a block

Without sequence parallelism the sums are all-reduced and nothing else is sent. Operands that the
recipe quantises are gathered as codes (`LayerPlan.sources`), but for those of experts.
"""

from collections.abc import Sequence
from typing import Final

from fp4train.lab.costs.links import NOTHING_SENT, Group, Traffic
from fp4train.lab.costs.weights import ModelWeight
from fp4train.parallel.config import Mesh
from fp4train.parameters import Split
from fp4train.precision.layer_plan import LayerPlan


def tensor_traffic(
    weights: Sequence[ModelWeight], stream: float, mesh: Mesh, group: Group
) -> tuple[Traffic, Traffic]:
    """(Forward, backward) in a block and microbatch.

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
