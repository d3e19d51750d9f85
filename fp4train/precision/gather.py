"""What of a weight is sent when FSDP gathers it from the shards of the float32 master, and why.

Codes of a shard are the shard of the codes if it consists of whole blocks of scales, so a quantised weight can be sent
as codes and scales: 0.504 bytes per weight in NVFP4, where float32 takes four. The weight of a layer that multiplies in
high precision is rounded to its recipe's dtype by each rank before it is sent, which changes nothing: rounding is
elementwise. Everything else is gathered in float32 and quantised whole by every rank, as on one rank.
"""

from __future__ import annotations

from typing import Final

from fp4train.precision.plan import LayerPlan
from fp4train.quantize import QuantSpec, why_not_cut

GATHERS: Final = ("recipe", "bf16", "fp32")
"""What ranks send each other of weights: by the recipe; all in BF16, which rounds masters before they are quantised;
all in float32."""


def effective(gather: str, *, compiled: bool, stages: int = 1) -> str:
    """What is sent if `gather` is configured: graphs of torch.compile and stages of a pipeline take float32 weights."""
    return "fp32" if compiled or stages > 1 else gather


def quantised_forms(plan: LayerPlan) -> tuple[QuantSpec | None, QuantSpec | None]:
    """The specs of the weight's row-wise form (fprop) and of its column-wise form (dgrad)."""
    return plan.fprop.operands.second, plan.dgrad.operands.second


def why_float32(plan: LayerPlan, shards: int) -> str | None:
    """Why a weight that `plan` quantises is gathered in float32 instead of as codes.

    Args:
        shards: ranks that share the weight's rows, equally.

    Returns:
        The reason; None: it is sent as codes and scales, or `plan` does not quantise it.
    """
    row, column = quantised_forms(plan)
    if row is None and column is None:
        return None
    if plan.layer.block is None:
        return "it lies outside the blocks"
    if plan.layer.cut is not None:
        return "tensor parallelism cuts it"
    if plan.layer_backend is not None:
        return f"{plan.layer_backend} quantises the weight itself"
    rows, rest = divmod(plan.layer.out_features, shards)
    if rest:
        return f"{plan.layer.out_features} rows do not divide over {shards} shards"
    for spec, columns in ((row, False), (column, True)):
        if spec is None:
            continue
        if spec.rounding == "stochastic":
            return "the weight is rounded stochastically"
        if spec.hadamard is not None:
            return "the weight is Hadamard-transformed"
        if (why := why_not_cut(spec, rows, columns=columns)) is not None:
            return why
    return None
