"""TE's modules in other people's models: their weight, and the table of the recipe of TE's autocast."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.backends.protocol import ForeignLinear, NotShownError
from fp4train.backends.table import DTYPES, Operands, Table
from fp4train.backends.te.translate import to_te
from fp4train.quantize import Hadamard, QuantSpec

_NO_NUMBERS = ("fp8_dpa", "fp8_mha", "quantization_alignment", "margin")
"""Fields of TE's recipes on which no linear layer depends: those of attention, of padding, and one
that only delayed scaling has.
"""


def foreign_linear(module: nn.Module) -> ForeignLinear | None:
    """A module of TE with linear layers, whatever loop it runs in; None: it is none.

    TE is not imported: without it no module is of its classes.
    """
    te = sys.modules.get("transformer_engine.pytorch")
    if te is None:
        return None
    names = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
    kind = next((name for name in names if type(module) is getattr(te, name, None)), None)
    if kind is None:
        return None
    return ForeignLinear(
        title=f"Transformer Engine's {kind}",
        takes_x=kind == "Linear",
        why_not=_why_not(kind, module),
        weight=partial(_weight, module),
        table=_table_now,
    )


def _why_not(kind: str, module: Any) -> str | None:
    """Why calls of a module of TE cannot be compared; None: they can."""
    if kind == "GroupedLinear":
        return "Transformer Engine's GroupedLinear multiplies all experts in one call"
    if kind == "LayerNormMLP":
        return "Transformer Engine's LayerNormMLP multiplies two weights in one module"
    if getattr(module, "tp_size", 1) > 1 or getattr(module, "sequence_parallel", False):
        return "Transformer Engine's tensor parallelism: a rank has a part of each product"
    if getattr(module, "primary_weights_in_fp8", False):
        return "its weight exists in codes only"
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        return "its wgrad is computed after the backward pass"
    return None


def _weight(module: Any) -> Tensor:
    """The weight [N, K] of a module of TE.

    Raises:
        NotShownError: other ranks have parts of it, or it exists in codes only.
    """
    parts = [getattr(module, name) for name in module.weight_names]
    if any(type(part) not in (Tensor, nn.Parameter) for part in parts):
        raise NotShownError(f"its weight is of the kind {type(parts[0]).__name__}")
    return torch.cat([part.detach() for part in parts])


def _table_now(dtype: torch.dtype) -> Table:
    """The table of the recipe of TE's autocast, for layers of this dtype.

    Raises:
        NotShownError: it is none of fp4train's.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    name = next((name for name, known in DTYPES.items() if known is dtype), None)
    if name is None:
        raise NotShownError(f"it computes in {dtype}")
    if not FP8GlobalStateManager.is_fp8_enabled():
        return Table(dtype=name)
    return table_of(FP8GlobalStateManager.get_fp8_recipe(), name)


def table_of(te_recipe: Any, dtype: str) -> Table:
    """The table of one of TE's recipes.

    Raises:
        NotShownError: it has options that no table here stands for.
    """
    kind = type(te_recipe).__name__
    makers = {
        "NVFP4BlockScaling": _nvfp4,
        "MXFP8BlockScaling": _mxfp8,
        "Float8CurrentScaling": _fp8_current,
        "Float8BlockScaling": _fp8_block,
    }
    if kind not in makers:
        raise NotShownError(f"Transformer Engine's recipe {kind} has no counterpart here")
    x, w, dy, transform = makers[kind](te_recipe)
    if te_recipe.backward_override is not None:
        raise NotShownError(f"its backward pass is {te_recipe.backward_override}")
    table = Table(
        fprop=Operands(first=x, second=w),
        dgrad=Operands(first=dy, second=w),
        wgrad=Operands(
            first=dataclasses.replace(dy, hadamard=transform),
            second=dataclasses.replace(x, hadamard=transform),
        ),
        dtype=dtype,
        name=kind,
    )
    try:
        again = to_te(table)
    except ValueError as error:
        raise NotShownError(f"Transformer Engine's recipe {kind}: {error}") from error
    for field in dataclasses.fields(te_recipe):
        value = getattr(te_recipe, field.name)
        if field.name not in _NO_NUMBERS and getattr(again, field.name, value) != value:
            raise NotShownError(f"Transformer Engine's {kind} has {field.name}={value!r}")
    return table


_Specs = tuple[QuantSpec, QuantSpec, QuantSpec, Hadamard | None]
"""Of x, w and dy, and the transform of the operands of wgrad."""


def _nvfp4(te_recipe: Any) -> _Specs:
    x = QuantSpec()
    w = x if te_recipe.disable_2d_quantization else QuantSpec(block=(16, 16))
    dy = x if te_recipe.disable_stochastic_rounding else QuantSpec(rounding="stochastic")
    return x, w, dy, None if te_recipe.disable_rht else Hadamard()


def _fp8(element: str, block: tuple[int | None, int | None], scale: str) -> QuantSpec:
    return QuantSpec(element=element, block=block, scale=scale, global_scale=None)


def _of_gradients(te_recipe: Any) -> str:
    return "e5m2" if te_recipe.fp8_format.name == "HYBRID" else "e4m3"


def _mxfp8(te_recipe: Any) -> _Specs:
    x = _fp8("e4m3", (1, 32), "e8m0")
    w = _fp8("e4m3", (32, 32), "e8m0") if te_recipe.enable_2d_quantization else x
    return x, w, _fp8(_of_gradients(te_recipe), (1, 32), "e8m0"), None


def _fp8_current(te_recipe: Any) -> _Specs:
    scale = "pow2" if te_recipe.fp8_quant_fwd_inp.power_2_scale else "fp32"
    x = _fp8("e4m3", (None, None), scale)
    return x, x, _fp8(_of_gradients(te_recipe), (None, None), scale), None


def _fp8_block(te_recipe: Any) -> _Specs:
    scale = "pow2" if te_recipe.fp8_quant_fwd_inp.power_2_scale else "fp32"
    x = _fp8("e4m3", (1, 128), scale)
    w = _fp8("e4m3", (128, 128), scale) if te_recipe.w_block_scaling_dim == 2 else x
    return x, w, _fp8(_of_gradients(te_recipe), (1, 128), scale), None
