"""The choice of a kernel, made once for a spec and a device type."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from fp4train.quantize.quantize import both_operands, operand, operand_and_codes, quantize, quantize_dequantize
from fp4train.quantize.quantized import Decoded, Form, Quantized
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec


class Quantizer:
    def __init__(self, spec: QuantSpec, kernel: str) -> None:
        self.spec, self.kernel = spec, kernel

    def codes(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
        return quantize(x_RC, self.spec, key=key, amax=amax, kernel=self.kernel)

    def values(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Decoded:
        return quantize_dequantize(x_RC, self.spec, key=key, amax=amax, kernel=self.kernel)

    def decode(self, q: Quantized) -> Decoded:
        return operand(q, kernel=self.kernel)


@cache
def quantizer(spec: QuantSpec, device_type: str, kernel: str = "auto") -> Quantizer:
    return Quantizer(spec, kernel)


class PairQuantizer:
    def __init__(self, row: Quantizer, column: Quantizer, *, row_codes: bool, column_codes: bool) -> None:
        self.row, self.column, self.row_codes, self.column_codes = row, column, row_codes, column_codes

    def __call__(
        self,
        x_MK: Tensor,
        row_key: RandomKey | None = None,
        row_amax: Tensor | None = None,
        column_key: RandomKey | None = None,
        column_amax: Tensor | None = None,
    ) -> tuple[Decoded | Quantized, Decoded | Quantized]:
        row = Form(spec=self.row.spec, key=row_key, amax=row_amax)
        column = Form(spec=self.column.spec, key=column_key, amax=column_amax)
        if not self.row_codes:
            return (operand_and_codes if self.column_codes else both_operands)(x_MK, row, column)
        a = self.row.codes(x_MK, row_key, row_amax)
        return a, (self.column.codes if self.column_codes else self.column.values)(x_MK.T, column_key, column_amax)
