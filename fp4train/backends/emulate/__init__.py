"""Emulation at BF16 speed: operands are quantised and decoded to BF16, products are exact. Runs everywhere.

Beside it torch's own GEMM, for operands that are not quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.backends.emulate.accumulation import float32_accumulation
from fp4train.backends.emulate.matmul import matmul
from fp4train.backends.emulate.widening import widened
from fp4train.backends.protocol import Prepared
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, quantize_dequantize, quantizer

__all__ = ["EMULATE", "TORCH", "Emulate", "TorchGemm", "matmul", "widened"]


class Emulate:
    """Products of decoded operands."""

    name = "emulate"
    takes_codes = False

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        """None: every spec can be emulated on every device."""
        return None

    def prepare(
        self, x_RC: Tensor, spec: QuantSpec | None, *, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        return Decoded(x_RC, None) if spec is None else quantize_dequantize(x_RC, spec, key=key, amax=amax)

    def product(self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if isinstance(a, Quantized):
            a = quantizer(a.spec, a.codes.device.type).decode(a)
        if isinstance(b, Quantized):
            b = quantizer(b.spec, b.codes.device.type).decode(b)
        if a.values.device.type != "cuda":
            return matmul(a, b, out_dtype=out_dtype, bias=bias)
        with float32_accumulation("cuda"):
            return matmul(a, b, out_dtype=out_dtype, bias=bias)

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return True


class TorchGemm(Emulate):
    """torch's GEMM, in the dtype of the operands."""

    name = "torch"

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        return "quantised operands need a backend that supports their format" if table[gemm].quantised else None

    def product(self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        assert not isinstance(a, Quantized) and not isinstance(b, Quantized)
        return matmul(a, b, out_dtype=out_dtype, bias=bias)


EMULATE, TORCH = Emulate(), TorchGemm()
