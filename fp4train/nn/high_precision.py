"""A linear layer in high precision whose backward pass reads the weight again, and may leave dw in float32.

torch's own saves the rounded weight for backward: a copy per call, of every microbatch in flight. Where the weight is
gathered for the time of a call that would keep a whole model on every rank. It also rounds dw to the dtype of the
product where dw is one term of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import BACKENDS, widened
from fp4train.nn.call import Call
from fp4train.nn.gathered import Gathered
from fp4train.quantize import Decoded


class HighPrecision(torch.autograd.Function):
    """y [M, N] of (x [M, K], w [N, K], bias [N] or None, sums, call), in the dtype of x.

    As torch's linear layer computes it, in every bit, but that dw is a float32 product with `sums`. `call`: of the
    layer, whose prepared weights hold the rounded one for all calls of a step; None: each call rounds it.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, sums: bool, call: Call | None = None
    ) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.sums, ctx.call = sums, call
        return widened(torch.nn.functional.linear, x_MK, _values(w_NK, x_MK.dtype, call), bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, w_NK = ctx.saved_tensors
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = widened(torch.mm, dy_MN, _values(w_NK, dy_MN.dtype, ctx.call))
        if ctx.needs_input_grad[1] and ctx.sums:
            dw = BACKENDS["torch"].product(Decoded(dy_MN.T, None), Decoded(x_MK.T, None), out_dtype=torch.float32)
        elif ctx.needs_input_grad[1]:
            dw = widened(torch.mm, dy_MN.T, x_MK).to(w_NK.dtype)
        if ctx.needs_input_grad[2]:
            dbias = widened(torch.sum, dy_MN, dim=0)
        return dx, dw, dbias, None, None


def _values(w_NK: Tensor, dtype: torch.dtype, call: Call | None) -> Tensor:
    if isinstance(w_NK, Gathered):
        return w_NK.source.values(dtype)
    if call is None or w_NK.dtype == dtype:
        return w_NK.to(dtype)
    rounded = call.weights.form(w_NK, call.gemms.w_row, call)
    assert isinstance(rounded, Decoded)
    return rounded.values
