"""The exact, slow product: block by block along the contraction axis, as Transformer Engine's reference accumulates.

    y = Σ_k  (a_k · b_kᵀ) · (scale of a's block k) · (scale of b's block k)

with a_k the k-th slice of `block` columns. Element products are exact in float32, of 4-bit codes their sum over a block
of 16 is too, and blocks are added to a float32 accumulator one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.backends.native import prepare
from fp4train.quantize import Decoded, Quantized, QuantSpec

__all__ = ["prepare", "product", "why_not"]


def why_not(first: QuantSpec | None, second: QuantSpec | None, device: str) -> str | None:
    """None: the reference multiplies everything."""
    return None


def product(
    a: Decoded | Quantized, b: Decoded | Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S]."""
    a_op, b_op = (x.decoded() if isinstance(x, Quantized) else x for x in (a, b))
    widths = [x.spec.block[1] for x in (a, b) if isinstance(x, Quantized) and x.spec.block[1] is not None]
    step = min(widths, default=a_op.values.shape[1]) or 1
    y = a_op.values.new_zeros((a_op.values.shape[0], b_op.values.shape[0]), dtype=torch.float32)
    for start in range(0, a_op.values.shape[1], step):
        block = slice(start, start + step)
        y += a_op.values[:, block].float() @ b_op.values[:, block].float().T
    for scale in (a_op.scale, b_op.scale.T if b_op.scale is not None and b_op.scale.dim() == 2 else b_op.scale):
        if scale is not None:
            y *= scale
    return (y if bias is None else y + bias.to(out_dtype)).to(out_dtype)
