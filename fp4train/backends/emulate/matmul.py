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

from fp4train.backends.emulate.widening import widened, widens
from fp4train.quantize import Decoded


def matmul(a: Decoded, b: Decoded, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [R, C] times bᵀ [C, S], all scales applied, plus `bias` [S], rounded once to `out_dtype`."""
    dtype = torch.promote_types(a.values.dtype, b.values.dtype)
    bias = None if bias is None else bias.to(out_dtype)
    scales = [scale for scale in (a.scale, b.scale) if scale is not None]
    if dtype == out_dtype != torch.float32 and all(scale.dim() == 0 for scale in scales):
        if not scales:
            return widened(F.linear, a.values, b.values, bias)
        if a.values.device.type == "cpu" and not widens(a.values):
            alpha = math.prod(float(scale) for scale in scales)
            # If the product of the scales is not a normal float32 number, they are applied one after the other.
            if not torch.finfo(torch.float32).smallest_normal > alpha and alpha != math.inf:
                return _scaled_in_accumulator(a.values, b.values, alpha, bias)
    product = _float32_product(a.values, b.values)
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


def _scaled_in_accumulator(a: Tensor, b: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    """a·bᵀ·alpha (+ bias) with a single rounding, on CPUs."""
    if bias is None:
        return torch.addmm(a.new_empty(b.shape[0]), a, b.T, beta=0, alpha=alpha)
    return torch.addmm(bias, a, b.T, alpha=alpha)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == b.dtype != torch.float32 and a.device.type == "cuda":
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T
