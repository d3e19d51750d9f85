"""A linear layer in high precision whose backward pass reads the weight again, and may leave dw in float32.

torch's own saves the rounded weight for backward. Where the weight is gathered for the time of a call that would keep
a whole model on every rank; and it rounds dw to the dtype of the product, also where dw is one term of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import BACKENDS, widened
from fp4train.nn.gathered import Gathered
from fp4train.quantize import Decoded


class HighPrecision(torch.autograd.Function):
    """y [M, N] of (x [M, K], w [N, K], bias [N] or None, sums), in the dtype of x.

    As torch's linear layer computes it, in every bit, but that dw is a float32 product with `sums`.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, sums: bool) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.sums = sums
        return widened(torch.nn.functional.linear, x_MK, _values(w_NK, x_MK.dtype), bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_MK, w_NK = ctx.saved_tensors
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = widened(torch.mm, dy_MN, _values(w_NK, dy_MN.dtype))
        if ctx.needs_input_grad[1] and ctx.sums:
            dw = BACKENDS["torch"].product(Decoded(dy_MN.T, None), Decoded(x_MK.T, None), out_dtype=torch.float32)
        elif ctx.needs_input_grad[1]:
            dw = widened(torch.mm, dy_MN.T, x_MK).to(w_NK.dtype)
        if ctx.needs_input_grad[2]:
            dbias = widened(torch.sum, dy_MN, dim=0)
        return dx, dw, dbias, None


def _values(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    return w_NK.source.values(dtype) if isinstance(w_NK, Gathered) else w_NK.to(dtype)
