"""The three GEMMs of a linear layer off Transformer Engine, and the autograd function that they make.

With q(·) what the recipe's table says of each operand (nothing, for high precision),

    fprop   y  [M, N] = q(x) [M, K] · q(w) [N, K]ᵀ + bias
    dgrad   dx [M, K] = q(dy) [M, N] · q(wᵀ) [K, N]ᵀ
    wgrad   dw [N, K] = q(dyᵀ) [N, M] · q(xᵀ) [K, M]ᵀ

Row-wise and column-wise forms are each quantised from the high-precision tensor: the transpose of a quantised tensor is
not the quantised transpose, except for square blocks. No flags decide anything here; the specs do. For backward q(xᵀ)
is kept as packed codes and scales (4.5 bits an element for NVFP4) instead of x.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import emulate, select
from fp4train.nn.call import Call
from fp4train.precision.context import Context, current
from fp4train.quantize import Decoded, Form, Quantized, both_operands, operand_and_codes, quantize
from fp4train.quantize.random import DGRAD_DY, FPROP_X, WGRAD_DY, WGRAD_X


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The dtypes of the gradients that backward will be asked for; None where it will not be."""

    x: torch.dtype | None
    w: torch.dtype | None
    bias: torch.dtype | None

    @classmethod
    def of(cls, tensors: tuple[Tensor | None, ...], wanted: tuple[bool, ...]) -> Gradients:
        """Those of (x, w, bias) that are wanted."""
        x, w, bias = (t.dtype if t is not None and want else None for t, want in zip(tensors, wanted, strict=True))
        return cls(x=x, w=w, bias=bias)


def torch_autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # "meta" knows no autocast


def without_torchs_autocast(device: str) -> AbstractContextManager[object]:
    """The GEMMs choose their own dtypes; torch.autocast must not cast their operands again, forward or backward."""
    return torch.autocast(device, enabled=False) if torch_autocasts(device) else nullcontext()


def prepare(gemm: ModuleType, x_RC: Tensor, form: Form | None) -> Decoded | Quantized:
    """x as `gemm` multiplies it."""
    prepared: Decoded | Quantized = (
        gemm.prepare(x_RC, None) if form is None else gemm.prepare(x_RC, form.spec, key=form.key, amax=form.amax)
    )
    return prepared


def prepare_input(
    x_MK: Tensor, row: Form | None, column: Form | None, gemm: ModuleType, context: Context | None
) -> tuple[Decoded | Quantized, Quantized | None]:
    """x as fprop multiplies it, and what wgrad is to have of it, None where that is x itself.

    Layers that read the same tensor one after another (queries, keys and values; gate and up) share both, and so keep
    one copy for backward. The memo holds on to x, which makes its address a proof of identity. A compiled graph puts
    other values into tensors that others hold, so what it calls has no `context` to share in.
    """
    free = all(form is None or (form.key is None and form.amax is None) for form in (row, column))
    of = None
    if context is not None and free and not x_MK.is_inference():
        of = (x_MK.data_ptr(), x_MK._version, x_MK.shape, x_MK.stride(), row, column, gemm)
    if context is not None and of is not None and context.memo.get("input", (None,))[0] == of:
        found: tuple[Decoded | Quantized, Quantized | None] = context.memo["input"][2]
        return found
    if row is not None and column is not None and gemm is emulate:
        prepared: tuple[Decoded | Quantized, Quantized | None] = operand_and_codes(x_MK, row, column)
    else:
        codes = None if column is None else quantize(x_MK.T, column.spec, key=column.key, amax=column.amax)
        prepared = prepare(gemm, x_MK, row), codes
    if context is not None and of is not None:
        context.memo["input"] = (of, x_MK, prepared)
    return prepared


def forward(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, call: Call, gradients: Gradients, *, share: Context | None
) -> tuple[Tensor, Quantized | Tensor | None]:
    """y [M, N] in the recipe's dtype, and what wgrad will need of x: q(xᵀ), or x in high precision, or nothing.

    Args:
        share: where layers that read the same x leave what they made of it for each other; None: nowhere.
    """
    table, dtype = call.recipe.table(), call.recipe.torch_dtype
    gemm, _ = select(call.backend, table["fprop"].first, table["fprop"].second, call.device)
    x = x_MK.to(dtype)
    row = call.form("x", table["fprop"].first, x, FPROP_X)
    column = call.form("x", table["wgrad"].second, x, WGRAD_X, along_tokens=True) if gradients.w else None
    a, codes_x = prepare_input(x, row, column, gemm, share)
    b = call.weights.rowwise(w_NK, table["fprop"].second, gemm, dtype, call)
    y_MN: Tensor = gemm.product(a, b, out_dtype=dtype, bias=bias_N)
    return y_MN, x if gradients.w and codes_x is None else codes_x


def backward(
    dy_MN: Tensor, w_NK: Tensor | None, x: Quantized | Tensor | None, call: Call, gradients: Gradients
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [M, K], dw [N, K], dbias [N]), None for what is not wanted. `x` is what `forward` said it would need."""
    table, dtype = call.recipe.table(), call.recipe.torch_dtype
    dgrad, wgrad = table["dgrad"], table["wgrad"]
    dgrad_gemm, _ = select(call.backend, dgrad.first, dgrad.second, call.device)
    wgrad_gemm, _ = select(call.backend, wgrad.first, wgrad.second, call.device)
    dy = dy_MN.to(dtype)
    dx_MK = dw_NK = dbias_N = None
    dy_row: Decoded | Quantized | None
    dy_column: Decoded | Quantized | None
    row = call.form("dy", dgrad.first, dy, DGRAD_DY) if gradients.x else None
    column = call.form("dy", wgrad.first, dy, WGRAD_DY, along_tokens=True) if gradients.w else None
    if row is not None and column is not None and dgrad_gemm is wgrad_gemm is emulate:
        dy_row, dy_column = both_operands(dy, row, column)
    else:
        dy_row = prepare(dgrad_gemm, dy, row) if gradients.x else None
        dy_column = prepare(wgrad_gemm, dy.T, column) if gradients.w else None
    if gradients.x:
        assert w_NK is not None
        w = call.weights.columnwise(w_NK, dgrad.second, dgrad_gemm, dtype, call)
        dx_MK = dgrad_gemm.product(dy_row, w, out_dtype=dtype).to(gradients.x)
    if gradients.w:
        b = prepare(wgrad_gemm, x.T, None) if isinstance(x, Tensor) else x
        dw_NK = wgrad_gemm.product(dy_column, b, out_dtype=dtype).to(gradients.w)
    if gradients.bias:
        dbias_N = dy.sum(0, dtype=torch.float32).to(gradients.bias)
    return dx_MK, dw_NK, dbias_N


class LinearFunction(torch.autograd.Function):
    """y of (x_MK, w_NK, bias_N, call). What it keeps is saved by autograd, whose hooks and version checks see it."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, call: Call) -> Tensor:
        gradients = Gradients.of((x_MK, w_NK, bias_N), ctx.needs_input_grad[:3])
        y_MN, x = forward(x_MK, w_NK, bias_N, call, gradients, share=current())
        tensors = (x.codes, x.scales, x.amax) if isinstance(x, Quantized) else (x, None, None)
        ctx.save_for_backward(w_NK if gradients.x else None, *tensors)
        ctx.form = (x.spec, x.shape) if isinstance(x, Quantized) else None
        ctx.call, ctx.gradients = call, gradients
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        w_NK, codes, scales, amax = ctx.saved_tensors
        x = codes
        if ctx.form is not None:
            spec, shape = ctx.form
            x = Quantized(spec=spec, shape=shape, codes=codes, scales=scales, amax=amax)
        with without_torchs_autocast(ctx.call.device):
            return (*backward(dy_MN, w_NK, x, ctx.call, ctx.gradients), None)
