"""Products of the codes themselves: torch's scaled_mm for FP8 operands with one scale a tensor or a row.

Needs hardware with FP8 tensor cores (compute capability 8.9 or newer), or a CPU, where torch computes the same product
slowly; there it is used only when asked for by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.backends import emulate
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, quantize

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALES = {(None, None): "tensor", (1, None): "row"}


def why_not(first: QuantSpec | None, second: QuantSpec | None, device: str) -> str | None:
    """Why scaled_mm cannot multiply such operands on `device` ("cpu", "cuda", …), or None."""
    if first is None or second is None:
        return "scaled_mm needs both operands quantised"
    for spec in (first, second):
        if spec.element not in _CODES:
            return f"scaled_mm is used for FP8 only, not {spec.element.upper()}"
        if spec.block not in _SCALES or spec.scale not in ("fp32", "pow2"):
            return f"scaled_mm is used with one scale a tensor or a row, not block={spec.block} scale={spec.scale}"
    if first.block != second.block:
        return "scaled_mm needs both operands scaled alike"
    if first.element == second.element == "e5m2":
        return "scaled_mm cannot multiply E5M2 by E5M2"
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return f"FP8 needs compute capability 8.9; this GPU has {capability[0]}.{capability[1]}"
    elif device != "cpu":
        return f"scaled_mm is not used on {device}"
    return None


def prepare(
    x_RC: Tensor, spec: QuantSpec | None, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> Decoded | Quantized:
    """x as codes and scales; x itself where `spec` is None."""
    return Decoded(values=x_RC, scale=None) if spec is None else quantize(x_RC, spec, key=key, amax=amax)


def product(
    a: Decoded | Quantized, b: Decoded | Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S]; what scaled_mm refuses (sizes off multiples of 16) is emulated."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)) or any(s % 16 for s in (*a.shape, *b.shape)):
        return emulate.product(a, b, out_dtype=out_dtype, bias=bias)
    if a.spec.block == (1, None) and a.codes.is_cuda and out_dtype != torch.bfloat16:
        return emulate.product(a, b, out_dtype=out_dtype, bias=bias)  # row-wise kernels write BF16 only
    inside = bias is not None and out_dtype != torch.float32
    y = torch._scaled_mm(
        a.codes.view(_CODES[a.spec.element]),
        b.codes.view(_CODES[b.spec.element]).T,
        scale_a=a.scales,
        scale_b=b.scales.T.contiguous(),
        bias=bias.to(out_dtype) if bias is not None and inside else None,
        out_dtype=out_dtype,
        # The faster accumulator keeps 14 bits; gradients need the exact one, and emulation promises it.
        use_fast_accum=False,
    )
    return y if bias is None or inside else y + bias
