"""The emulated product of two operands at BF16 speed.

A decoded element without its global scale is exact in BF16, so

    y [R, S] = (a.values · b.valuesᵀ) · a.scale · b.scale

with BF16 operands and float32 accumulation has exact products, like the tensor cores that it emulates. Only the order
of the additions differs. The global scales multiply the float32 product before it is rounded to the output dtype:
rounding the product to BF16 first would round twice.

Implementation: on a CPU with BF16 instructions, `addmm` with `alpha`, which oneDNN applies to the float32 accumulator;
on other CPUs a float32 product; on GPUs BF16 tensor cores with float32 output. A bias is rounded to the output dtype,
as in TE, and added before the product is rounded. Operands without scales (a GEMM in high precision) are multiplied by
torch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends.emulate import widening
from fp4train.backends.emulate.widening import widened
from fp4train.quantize import Decoded

_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


def matmul(a: Decoded, b: Decoded, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [R, C] times bᵀ [C, S], all scales applied, plus `bias` [S], rounded once to `out_dtype`."""
    x_RC, w_SC = a.values, b.values
    dtype = x_RC.dtype
    if dtype != w_SC.dtype:
        dtype = torch.promote_types(dtype, w_SC.dtype)
    if bias is not None:
        bias = bias.to(out_dtype)
    one = (a.scale is None or a.scale.dim() == 0) and (b.scale is None or b.scale.dim() == 0)
    if one and dtype == out_dtype and dtype != torch.float32:
        if a.scale is None and b.scale is None:
            return widened(F.linear, x_RC, w_SC, bias)
        if x_RC.is_cpu and dtype not in widening.WITHOUT_INSTRUCTIONS:
            alpha = (1.0 if a.scale is None else float(a.scale)) * (1.0 if b.scale is None else float(b.scale))
            # If the product of the scales is not a normal float32 number, they are applied one after the other.
            if not alpha < _SMALLEST_NORMAL and alpha != math.inf:
                # The accumulator is scaled, so that the result is rounded once.
                if bias is None:
                    return torch.addmm(x_RC.new_empty(w_SC.shape[0]), x_RC, w_SC.T, beta=0, alpha=alpha)
                return torch.addmm(bias, x_RC, w_SC.T, alpha=alpha)
    product = _float32_product(x_RC, w_SC)
    factors = [] if a.scale is None else [a.scale]
    if b.scale is not None:
        factors.append(b.scale if b.scale.dim() == 0 else b.scale.T)
    for factor in factors if bias is not None else factors[:-1]:
        product *= factor
    if bias is not None:
        return torch.add(product, bias.to(torch.float32), out=_empty(product, out_dtype))
    # The last factor and the rounding take one pass over the product.
    return torch.mul(product, factors[-1], out=_empty(product, out_dtype)) if factors else product.to(out_dtype)


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == b.dtype != torch.float32 and a.device.type == "cuda":
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T
