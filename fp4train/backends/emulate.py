"""Emulation at BF16 speed: operands are quantised and decoded to BF16, products are exact. Runs everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.backends.matmul import matmul
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, operand, quantize_dequantize


def why_not(first: QuantSpec | None, second: QuantSpec | None, device: str) -> str | None:
    """None: every spec is emulated on every device."""
    return None


def prepare(
    x_RC: Tensor, spec: QuantSpec | None, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> Decoded:
    """x as a decoded operand; x itself where `spec` is None."""
    if spec is None:
        return Decoded(values=x_RC, scale=None)
    return quantize_dequantize(x_RC, spec, key=key, amax=amax)


def product(
    a: Decoded | Quantized, b: Decoded | Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S]."""
    return matmul(_decoded(a), _decoded(b), out_dtype=out_dtype, bias=bias)


def _decoded(x: Decoded | Quantized) -> Decoded:
    return operand(x) if isinstance(x, Quantized) else x
