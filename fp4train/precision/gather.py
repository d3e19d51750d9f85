"""What of a weight is sent when FSDP gathers it from the shards of the float32 master, and why.

Codes of a shard are the shard of the codes if it consists of whole blocks of scales, so a quantised weight can be sent
as codes and scales: 0.504 bytes per weight in NVFP4, where float32 takes four. The weight of a layer that multiplies in
high precision is rounded to its recipe's dtype by each rank before it is sent, which changes nothing: rounding is
elementwise. Everything else is gathered in float32 and quantised whole by every rank, as on one rank.

`wire_form` alone decides: the run, its plan.txt and `fp4train plan` ask it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from fp4train.precision.plan import LayerPlan
from fp4train.quantize import QuantSpec, why_not_cut

GATHERS: Final = ("recipe", "bf16", "fp32")
"""What ranks send each other of weights: by the recipe; all in BF16, which rounds masters before they are quantised;
all in float32."""


class WireForm(NamedTuple):
    """How the weight of a layer travels.

    Args:
        row: the spec whose codes are sent for fprop; None: values.
        column: the same for dgrad, of wᵀ.
        dtype: of values.
        why: why values are sent in float32 although the recipe has fewer bits for the weight; None: they are not, or
            the configuration asks for it.
    """

    row: QuantSpec | None = None
    column: QuantSpec | None = None
    dtype: torch.dtype = torch.float32
    why: str | None = None


def effective(gather: str, *, compiled: bool, blocks: bool = True) -> str:
    """What is sent if `gather` is configured: graphs of torch.compile take float32 weights, and so does a model without
    blocks, which is gathered once and stays whole."""
    return gather if blocks and not compiled else "fp32"


def wire_form(plan: LayerPlan, shards: int, gather: str) -> WireForm:
    """How the weight of a layer is gathered.

    Args:
        plan: of the layer; if tensor parallelism cuts it, of this rank's part of it.
        shards: ranks that share the part's rows.
        gather: one of `GATHERS`, as it is effective.
    """
    if gather == "fp32":
        return WireForm()
    if plan.layer.block is None:  # the head: it lies in a unit that stays whole between forward and backward
        return WireForm()
    row, column = plan.fprop.operands.second, plan.dgrad.operands.second
    rows, rest = divmod(plan.layer.out_features, shards)
    if rest:
        return WireForm(why=f"{plan.layer.out_features} rows do not divide over {shards} shards")
    if gather == "bf16":
        return WireForm(dtype=torch.bfloat16)
    dtype = plan.table.torch_dtype
    if row is None and column is None:
        return WireForm(dtype=dtype)
    if (why := _why_values(plan, rows)) is not None:
        return WireForm(why=why)
    return WireForm(row=row, column=column, dtype=dtype)


def _why_values(plan: LayerPlan, rows: int) -> str | None:
    """Why a weight that `plan` quantises, of which a shard has so many rows, is not sent as codes."""
    if plan.has_outliers:
        return "its outlier channels are quantised apart"
    # No backend runs a part of a layer as a whole: parts are quantised by fp4train.
    if plan.layer_backend is not None and plan.layer.cut is None:
        return f"{plan.layer_backend} quantises the weight itself"
    for spec, columns in ((plan.fprop.operands.second, False), (plan.dgrad.operands.second, True)):
        if spec is None:
            continue
        if spec.rounding == "stochastic":
            return "the weight is rounded stochastically"
        if spec.hadamard is not None:
            return "the weight is Hadamard-transformed"
        if (why := why_not_cut(spec, rows, columns=columns)) is not None:
            return why
    return None
