"""Form in which a weight is sent when FSDP gathers it from the shards of the float32 master, with
the reason.

Codes of a shard are the shard of the codes if it consists of whole blocks of scales, so a quantised
weight can be sent as codes and scales: 0.504 bytes per weight in NVFP4, where float32 takes four. A
weight that dgrad requantises from what fprop multiplied (Quartet II, TetraJet-v2) is sent as the
codes of fprop for both; each rank requantises the whole. The weight of a layer that multiplies in
high precision is rounded to its recipe's dtype by each rank before it is sent, which changes
nothing: rounding is elementwise.

Of other weights BF16 is sent, and quantised whole by every rank. One rank quantises the float32
master, and a value that was rounded twice can fall on another code: the losses differ, and the plan
says so. Float32 is sent where shards are not whole blocks of scales, where another mesh or
`parallel.gather=bf16` is cheaper and the bits are one rank's.

`wire_form` alone decides: the run, its plan.txt and `fp4train plan` ask it.
"""

from typing import NamedTuple

import torch

from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Own, why_not_cut
from fp4train.quantize.source import source_bytes

GATHERS = ("recipe", "bf16", "fp32")
"""Forms of weights between ranks: by the recipe; all in BF16, which rounds masters before they are
quantised; all in float32.
"""


class WireForm(NamedTuple):
    """How the weight of a layer travels.

    Args:
        forward: the codes that are sent for fprop; None: values.
        backward: the codes that are sent for dgrad; None: values.
        dtype: the dtype of values.
        why: why values are sent although the recipe quantises the weight, or float32 although it
            has fewer bits for it; None: they are not, or the configuration asks for it.
        rounds: whether the values are rounded before a layer quantises them, which one rank does
            not do.
    """

    forward: Own | None = None
    backward: Own | None = None
    dtype: torch.dtype = torch.float32
    why: str | None = None
    rounds: bool = False

    @property
    def coded(self) -> bool:
        """Whether codes are sent for any of the two passes."""
        return self.forward is not None or self.backward is not None

    def bytes(self, rows: int, columns: int, *, backward: bool, repeats: bool = False) -> float:
        """Bytes of a whole weight [rows, columns] when it is gathered.

        Args:
            backward: for dgrad, else for fprop.
            repeats: backward also needs what fprop does, to recompute it.
        """
        sent = {self.backward if backward else self.forward}
        if backward and repeats:
            sent.add(self.forward)
        values = float(rows * columns * self.dtype.itemsize)
        return sum(
            values if codes is None else source_bytes(codes, "w", rows, columns) for codes in sent
        )


def gather_mode(gather: str, *, fully_gathered: bool, blocks: bool = True) -> str:
    """One of `GATHERS`, the effective one where `gather` is configured: graphs, of torch.compile
    and of CUDA, take float32 weights (`fully_gathered`), and so does a model without blocks, which is
    gathered once and stays whole.
    """
    if blocks and not fully_gathered:
        return gather
    return "fp32"


def wire_form(plan: LayerPlan, shards: int, gather: str) -> WireForm:
    """How the weight of a layer is gathered.

    Args:
        plan: the layer's plan; if tensor parallelism cuts it, of this rank's part of it.
        shards: ranks that share the part's rows; of experts that ranks share, with these ranks.
        gather: one of `GATHERS`, as it is effective.
    """
    if gather == "fp32":
        return WireForm()
    # the head: it lies in a unit that stays whole between forward and backward
    if plan.layer.block is None:
        return WireForm()
    operands = plan.sources["fprop", "w"], plan.sources["dgrad", "w"]
    experts = plan.layer.experts
    shards //= plan.layer.sources
    rows, remainder = divmod(experts or plan.layer.out_features, shards)
    if remainder:
        if experts:
            what = f"{experts} experts"
        else:
            what = f"{plan.layer.out_features} rows"
        return WireForm(why=f"{what} do not divide over {shards} shards")
    quantised = any(operand.codes is not None for operand in operands)
    if gather == "bf16":
        return WireForm(dtype=torch.bfloat16, rounds=quantised)
    dtype = plan.table.torch_dtype
    if not quantised:
        return WireForm(dtype=dtype)
    if (why := _why_rounded(plan)) is not None:
        return WireForm(dtype=torch.bfloat16, why=why, rounds=True)
    forward, backward = (operand.sent for operand in operands)
    if experts and any(
        codes is not None and codes.spec.earlier_amax for codes in (forward, backward)
    ):
        return WireForm(why="the history of each expert's amaxes is that of the whole group")
    if experts and plan.fused:
        return WireForm(why="an expert shares its scale with one of another layer")
    for codes in (forward, backward):
        if codes is None or experts:
            continue
        if (why := why_not_cut(codes.spec, rows, columns=codes.axis == "out")) is not None:
            return WireForm(why=why)
    return WireForm(forward=forward, backward=backward, dtype=dtype)


def _why_rounded(plan: LayerPlan) -> str | None:
    """Why a weight that `plan` quantises is not sent as codes whatever its shape."""
    if plan.why_no_codes is not None:
        return plan.why_no_codes
    # No backend runs a part of a layer as a whole: parts are quantised by fp4train.
    if plan.layer_backend is not None and plan.layer.cut is None and plan.why_values is not None:
        return plan.why_values
    if plan.sources["fprop", "w"].of is not None:
        return "the weight is transformed"
    for gemm in ("fprop", "dgrad"):
        codes = plan.sources[gemm, "w"].sent
        if codes is not None and codes.spec.random:
            return "the weight is rounded stochastically"
        if codes is not None and codes.spec.hadamard is not None:
            return "the weight is transformed"
    return None
