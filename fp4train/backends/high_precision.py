"""Products of unquantised operands: torch's GEMM, in the dtype of the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.backends.emulate import matmul
from fp4train.backends.protocol import Prepared
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey


class HighPrecision:
    """torch's GEMM."""

    name = "torch"
    takes_codes = False

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        return "quantised operands need a backend that supports their format" if table[gemm].quantised else None

    def prepare(
        self, x_RC: Tensor, spec: QuantSpec | None, *, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        if spec is not None:
            raise ValueError(f"{spec} is quantised; torch's GEMM takes operands in high precision")
        return Decoded(x_RC, None)

    def product(self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        assert not isinstance(a, Quantized) and not isinstance(b, Quantized)
        return matmul(a, b, out_dtype=out_dtype, bias=bias)

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return True


HIGH = HighPrecision()
