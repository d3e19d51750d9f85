"""What nn/ and backends/ call until they hold quantizers: both forms of a tensor, and decoding, by spec."""

from dataclasses import dataclass

from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import PairQuantizer, quantizer
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one of the two forms of a tensor is made: row-wise of x, or column-wise, which is that of x.T.

    spec; key: its random bits; amax: the global one where it is known from elsewhere, as for `quantize`.
    """

    spec: QuantSpec
    key: RandomKey | None = None
    amax: Tensor | None = None


def operand(quantized: Quantized) -> Decoded:
    """`Quantizer.decode` of the quantizer that made it."""
    return quantizer(quantized.spec, quantized.codes.device.type).decode(quantized)


def both_operands(x_MK: Tensor, rowwise: Form, columnwise: Form) -> tuple[Decoded, Decoded]:
    """The values of x and of x.T."""
    return _both(x_MK, rowwise, columnwise, column_codes=False)  # type: ignore[return-value]


def operand_and_codes(x_MK: Tensor, rowwise: Form, columnwise: Form) -> tuple[Decoded, Quantized]:
    """The values of x, and the codes of x.T."""
    return _both(x_MK, rowwise, columnwise, column_codes=True)  # type: ignore[return-value]


def _both(
    x_MK: Tensor, row: Form, column: Form, *, column_codes: bool
) -> tuple[Decoded | Quantized, Decoded | Quantized]:
    device = x_MK.device.type
    pair = PairQuantizer(
        quantizer(row.spec, device), quantizer(column.spec, device), row_codes=False, column_codes=column_codes
    )
    return pair(x_MK, row.key, row.amax, column.key, column.amax)
