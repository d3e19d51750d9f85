"""The integer grid under a floating-point format.

A magnitude a in the binade 2^e has the quantum q = 2^(max(e, emin) - m). Its position u = a/q is exact in float32,
since q is a power of two; a rounded position k (an integer <= 2^(m+1)) gives back the value k*q and the code k +
((max(e, emin) - emin) << m). At k = 2^(m+1) the code carries into the exponent. Rounding, to nearest or
stochastic, is the step from u to k.
"""

from typing import Protocol

import torch
from torch import Tensor


class Grid(Protocol):
    """The two parameters of a format that determine its grid."""

    @property
    def mantissa_bits(self) -> int: ...
    @property
    def min_exponent(self) -> int: ...


def grid_position(magnitude: Tensor, fmt: Grid) -> tuple[Tensor, Tensor]:
    """Position u = a/q (float32) and float32-biased exponent max(e, emin)+127 (int32) of magnitudes 0 <= a <= max.

    The positions are a fresh tensor that the caller may overwrite. NaN stays NaN in u.
    """
    exponent = (magnitude.view(torch.int32) >> 23).clamp_(min=fmt.min_exponent + 127)
    inverse_quantum = ((254 + fmt.mantissa_bits - exponent) << 23).view(torch.float32)
    return inverse_quantum.mul_(magnitude), exponent


def grid_code(position: Tensor, exponent: Tensor, fmt: Grid) -> Tensor:
    """Code without sign (int32) of integer positions, all finite."""
    return position.to(torch.int32) + ((exponent - (fmt.min_exponent + 127)) << fmt.mantissa_bits)


def grid_value(position: Tensor, exponent: Tensor, fmt: Grid) -> Tensor:
    """Magnitude (float32) of integer positions; overwrites and returns `position`."""
    return position.mul_(((exponent - fmt.mantissa_bits) << 23).view(torch.float32))


def magnitude(code: Tensor, mantissa_bits: int, bias: int) -> Tensor:
    """Float32 value of codes without sign (int32): (1 + M/2^m) * 2^(E-b), and M/2^m * 2^(1-b) for E = 0. Exact."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    normal = (((exponent + (127 - bias)) << 23) | (mantissa << (23 - mantissa_bits))).view(torch.float32)
    return torch.where(exponent > 0, normal, mantissa.to(torch.float32) * 2.0 ** (1 - bias - mantissa_bits))
