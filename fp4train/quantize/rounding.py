"""Round scaled float32 values to the element grid: to nearest (ties to even) or stochastically.

Both work on the position u = |t|/quantum of `formats.grid`, an exact float32. Nearest: k = round_half_even(u).
Stochastic, with 16 random bits r of the element: k = floor(u) + [(r + 1/2) / 2^16 < u - floor(u)]. With the half, a
value on the grid stays there for every r, and the probability of rounding up equals the fraction to within 2^-17: no
bias, as long as |t| <= max. Larger |t| saturates, and that clipping is a bias: see `QuantSpec.guard`.
"""

import torch
from torch import Tensor

from fp4train.formats import E4M3, E5M2, ElementFormat
from fp4train.formats.grid import grid_code, grid_position, grid_value


def round_position(position: Tensor, bits: Tensor | None) -> Tensor:
    """Integer positions from real ones; bits (int32, 0..65535, same shape) select stochastic rounding. May
    overwrite.
    """
    if bits is None:
        return position.round_()
    floor = position.floor()
    threshold = bits.to(torch.float32).add_(0.5).mul_(2.0**-16)
    return floor.add_(threshold < position.sub_(floor))


def round_to_values(t: Tensor, fmt: ElementFormat, bits: Tensor | None = None) -> Tensor:
    """Values on the grid of fmt (float32), saturating; the sign of zero is kept and NaN stays NaN."""
    if bits is None and (fmt is E4M3 or fmt is E5M2):
        float8 = torch.float8_e4m3fn if fmt is E4M3 else torch.float8_e5m2
        return t.clamp(-fmt.max, fmt.max).to(float8).to(torch.float32)
    position, exponent = grid_position(t.abs().clamp_(max=fmt.max), fmt)
    return grid_value(round_position(position, bits), exponent, fmt).copysign_(t)


def round_to_codes(t: Tensor, fmt: ElementFormat, bits: Tensor | None = None) -> Tensor:
    """uint8 codes (one per byte), saturating. NaN gives `fmt.nan_code`: NaN in E4M3 and E5M2, else the largest value,
    whose block scale is then NaN.
    """
    if bits is None and (fmt is E4M3 or fmt is E5M2):
        float8 = torch.float8_e4m3fn if fmt is E4M3 else torch.float8_e5m2
        codes = t.clamp(-fmt.max, fmt.max).to(float8).view(torch.uint8)
    else:
        position, exponent = grid_position(torch.fmin(t.abs(), t.new_full((), fmt.max)), fmt)
        magnitude = grid_code(round_position(position, bits), exponent, fmt)
        codes = (magnitude | (torch.signbit(t).to(torch.int32) << (fmt.bits - 1))).to(torch.uint8)
    return torch.where(t.isnan(), fmt.nan_code, codes).to(torch.uint8)
