"""UE5M3, an unsigned 8-bit scale format: 5 exponent and 3 mantissa bits: the sign bit of E4M3 becomes range.

Proposed for FP4 block scales in "Is Finer Better? The Limits of Microscaling Formats in Large Language Models" (Fasoli
et al., arXiv 2601.19026): with 33 binades of normal numbers it needs no global scale, hence no amax of the tensor,
and it keeps the precision of E4M3. Bias 15; as in E4M3 there is no infinity and one NaN, the code of all ones, so the
largest value is 1.75 * 2^16 = 114688 and the smallest 2^-17. Rounding is to nearest, ties to even.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp4train.formats.grid import grid_code, grid_position, magnitude
from fp4train.formats.scale import ScaleFormat

BIAS: Final = 15
NAN_CODE: Final = 255
LARGEST: Final = 114688.0


@dataclass(frozen=True)
class _Grid:
    mantissa_bits: int = 3
    min_exponent: int = 1 - BIAS


_GRID: Final = _Grid()


def ue5m3_encode(x: Tensor) -> Tensor:
    """Bytes of the nearest UE5M3 value, ties to even, saturating at 114688; NaN gives 255. x float32 and >= 0."""
    position, exponent = grid_position(torch.fmin(x, x.new_full((), LARGEST)), _GRID)
    codes = grid_code(position.round_(), exponent, _GRID)
    return torch.where(x.isnan(), NAN_CODE, codes).to(torch.uint8)


def ue5m3_decode(codes: Tensor) -> Tensor:
    """Float32 value of each UE5M3 byte; NaN for 255. Exact."""
    code = codes.to(torch.int32)
    return torch.where(code == NAN_CODE, math.nan, magnitude(code, _GRID.mantissa_bits, BIAS))


UE5M3_SCALE: Final = ScaleFormat(
    name="ue5m3",
    dtype=torch.uint8,
    mantissa_bits=3,
    smallest=2.0**-17,
    smallest_normal=2.0**-14,
    max=LARGEST,
    needs_global=False,
    encode=ue5m3_encode,
    decode=ue5m3_decode,
)
