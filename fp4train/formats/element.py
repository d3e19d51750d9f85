"""Element formats: the values of codes of 4, 6 or 8 bits, the grid that they lie on, and how codes
are packed.

A code is sign | exponent (e bits) | mantissa (m bits). With bias b and stored exponent E the
magnitude is (1 + M/2^m) * 2^(E-b) for E > 0 and (M/2^m) * 2^(1-b) for E = 0: within one binade, and
over all subnormals, the grid is uniform with quantum q = 2^(max(exponent, 1-b) - m). The position u
= a/q of a magnitude a is exact in float32, since q is a power of two. Rounding, to nearest or
stochastic, is the step from u to an integer k <= 2^(m+1), which gives back the value k*q and the
code k + ((max(exponent, 1-b) - (1-b)) << m); at k = 2^(m+1) the code carries into the exponent.

Packing of sub-byte codes. FP4: two codes per byte, the first in the low nibble (the order of TE,
cuBLAS and torch's `float4_e2m1fn_x2`). FP6: one code per byte.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3.1-5.3.3 (E4M3, E5M2, E3M2, E2M3, E2M1);
OCP 8-bit floating point v1.0 for infinities and NaN: E4M3 has no infinity and one NaN magnitude
(0x7f), E5M2 is IEEE-like, FP6 and FP4 have neither.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SMALLEST = 2.0**-64
LARGEST = 2.0**64
"""What magnitudes of an element format must lie between, so that their products with scales and the
positions on the grid are normal numbers of float32.
"""


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A binary floating-point format, and what torch and GPUs know of it.

    Args:
        name: value of `QuantSpec.element`, in lower case.
        exponent_bits, mantissa_bits: widths of the two fields of a code.
        bias: difference of the stored exponent and the exponent.
        has_inf: whether the largest exponent is kept for infinities and NaN, as IEEE has it.
        has_nan: whether the code of all ones is NaN.
        dtype: torch's dtype of stored codes, two of a packed format in one element of it; None:
            torch has none.
        rate: the class of tensor-core products, a key of `Gpu.peaks`; None: no tensor core
            multiplies the format.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool = False
    has_nan: bool = False
    dtype: torch.dtype | None = None
    rate: str | None = None

    @cached_property
    def bits(self) -> int:
        """Width of one code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def packed(self) -> bool:
        """Whether two codes are stored in a byte, the first in the low nibble; else a byte holds
        one code.
        """
        return self.bits <= 4

    @property
    def float8(self) -> torch.dtype | None:
        """torch's dtype whose casts are this format's, to nearest; None: torch casts to no such
        format.
        """
        return self.dtype if self.bits == 8 else None

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        if self.has_inf:
            return self.magnitude_of(self.infinity_code - 1)
        return self.magnitude_of(self.nan_code - self.has_nan)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number and of the subnormal numbers."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two in the format (emax in the MX specification)."""
        return math.frexp(self.max)[1] - 1

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def binades(self) -> float:
        """Dynamic range log2(max / smallest subnormal)."""
        return math.log2(self.max) - math.log2(self.smallest_subnormal)

    @property
    def nan_code(self) -> int:
        """The code of NaN: all bits but the sign. In a format without NaN it is the largest
        value.
        """
        return (1 << (self.bits - 1)) - 1

    @property
    def infinity_code(self) -> int:
        """The code of infinity, without sign, in a format that has it: all ones in the exponent."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def last_number_code(self) -> int:
        """The largest code, without sign, that is no NaN."""
        if self.has_inf:
            return self.infinity_code
        return self.nan_code - self.has_nan

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    def magnitude_of(self, code: int) -> float:
        """The value of a code without sign, by the formula above; of the codes of infinity and NaN,
        too.
        """
        exponent = code >> self.mantissa_bits
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        significand = mantissa + (1 << self.mantissa_bits if exponent else 0)
        return math.ldexp(significand, max(exponent, 1) - self.bias - self.mantissa_bits)


def check_element(fmt: ElementFormat) -> None:
    """Refuse a format that tensors cannot be quantised to.

    Raises:
        ValueError: it is wider than a byte, has values that the float32 arithmetic of scales and
            of the grid does not hold, or names a dtype or a rate.
    """
    place = f"element format {fmt.name!r}"
    fields = (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias)
    if not all(type(field) is int for field in fields):
        raise ValueError(
            f"{place}: exponent_bits, mantissa_bits and bias are integers, not {fields}"
        )
    for name in ("has_inf", "has_nan"):
        if type(getattr(fmt, name)) is not bool:
            raise ValueError(f"{place}: {name}={getattr(fmt, name)!r} must be true or false")
    if fmt.dtype is not None or fmt.rate is not None:
        raise ValueError(
            f"{place}: dtype and rate are those of formats that torch and tensor cores know; leave "
            "them out"
        )
    if fmt.exponent_bits < 0 or fmt.mantissa_bits < 0 or not 2 <= fmt.bits <= 8:
        raise ValueError(
            f"{place}: exponent_bits={fmt.exponent_bits} and mantissa_bits={fmt.mantissa_bits}: "
            "allowed are codes of 2 to 8 bits, one of them the sign"
        )
    if fmt.has_inf and not (fmt.has_nan and fmt.exponent_bits and fmt.mantissa_bits):
        raise ValueError(
            f"{place}: has_inf=True needs has_nan=True, an exponent and a mantissa, as IEEE has it"
        )
    if fmt.last_number_code < 1 or fmt.max <= 0.0:
        raise ValueError(f"{place}: it has no value but zero; give it more bits")
    if fmt.smallest_subnormal < SMALLEST or fmt.max > LARGEST:
        raise ValueError(
            f"{place}: its values reach from {fmt.smallest_subnormal:.3g} to {fmt.max:.3g}; the "
            f"arithmetic of scales and of the grid takes those from 2^-64 to 2^64: choose another "
            f"bias than {fmt.bias}"
        )


E2M1 = ElementFormat(
    name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, dtype=torch.float4_e2m1fn_x2, rate="FP4"
)
E1M2 = ElementFormat(name="e1m2", exponent_bits=1, mantissa_bits=2, bias=1)
INT4 = ElementFormat(name="int4", exponent_bits=1, mantissa_bits=2, bias=-1)
"""The integers from -7 to 7, as sign and magnitude: with one exponent bit the grid is uniform."""
E2M3 = ElementFormat(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1, rate="FP6")
E3M2 = ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3, rate="FP6")
E4M3 = ElementFormat(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    has_nan=True,
    dtype=torch.float8_e4m3fn,
    rate="FP8",
)
E5M2 = ElementFormat(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    has_inf=True,
    has_nan=True,
    dtype=torch.float8_e5m2,
    rate="FP8",
)


def _wide(name: str, dtype: torch.dtype, exponent_bits: int, mantissa_bits: int) -> ElementFormat:
    """A format of IEEE's kind, whose rate has its name."""
    return ElementFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=(1 << (exponent_bits - 1)) - 1,
        has_inf=True,
        has_nan=True,
        dtype=dtype,
        rate=name.upper(),
    )


FP16 = _wide("fp16", torch.float16, 5, 10)
BF16 = _wide("bf16", torch.bfloat16, 8, 7)
FP32 = _wide("fp32", torch.float32, 8, 23)

WIDE_FORMATS = (FP16, BF16, FP32)
"""Formats of operands in high precision: dtypes of torch, which this package does not encode."""


def grid_position(magnitude: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    """Position u = a/q (float32) and float32-biased exponent max(e, emin)+127 (int32) of magnitudes
    0 <= a <= max.

    The positions are a fresh tensor that the caller may overwrite. NaN stays NaN in u.
    """
    exponent = (magnitude.view(torch.int32) >> 23).clamp_(min=fmt.min_exponent + 127)
    inverse_quantum = ((254 + fmt.mantissa_bits - exponent) << 23).view(torch.float32)
    return inverse_quantum.mul_(magnitude), exponent


def grid_code(position: Tensor, exponent: Tensor, fmt: ElementFormat) -> Tensor:
    """Code without sign (int32) of integer positions, all finite."""
    return position.to(torch.int32) + ((exponent - (fmt.min_exponent + 127)) << fmt.mantissa_bits)


def grid_value(position: Tensor, exponent: Tensor, fmt: ElementFormat) -> Tensor:
    """Magnitude (float32) of integer positions; overwrites and returns `position`."""
    return position.mul_(((exponent - fmt.mantissa_bits) << 23).view(torch.float32))


def magnitude(code: Tensor, fmt: ElementFormat) -> Tensor:
    """Float32 value of codes without sign (int32): (1 + M/2^m) * 2^(E-b), and M/2^m * 2^(1-b) for E
    = 0. Exact.
    """
    exponent = code >> fmt.mantissa_bits
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    normal = (((exponent + (127 - fmt.bias)) << 23) | (mantissa << (23 - fmt.mantissa_bits))).view(
        torch.float32
    )
    return torch.where(exponent > 0, normal, mantissa.to(torch.float32) * fmt.smallest_subnormal)


def encode(x: Tensor, fmt: ElementFormat, *, saturate: bool = True) -> Tensor:
    """Codes of x, rounded to nearest, ties to even. Any shape and floating dtype -> uint8 of the
    same shape, one code per byte.

    NaN becomes `fmt.nan_code` (without its sign); if the format has no NaN, that is the largest
    value, as in PTX `cvt`. Above the largest value: `saturate=True` clamps infinities too;
    `saturate=False` gives infinity (E5M2) or NaN (E4M3), and is refused for FP6 and FP4, whose
    standard has saturation only.
    """
    if not saturate and not fmt.has_nan:
        raise ValueError(
            f"saturate=False: {fmt.name} has neither infinity nor NaN to overflow to; use "
            "saturate=True"
        )
    x = x.to(torch.float32)
    # Past the largest value the next grid point is max + quantum; a tie goes to the even code,
    # which E4M3 has at max and E5M2 at max + quantum.
    quantum = math.ldexp(1.0, fmt.max_exponent - fmt.mantissa_bits)
    if fmt.has_inf:
        overflow = x.abs() >= fmt.max + quantum / 2
    else:
        overflow = x.abs() > fmt.max + quantum / 2
    position, exponent = grid_position(torch.fmin(x.abs(), x.new_full((), fmt.max)), fmt)
    codes = grid_code(position.round_(), exponent, fmt)
    if not saturate:
        codes = torch.where(overflow, fmt.infinity_code if fmt.has_inf else fmt.nan_code, codes)
    codes = codes | (torch.signbit(x).to(torch.int32) << (fmt.bits - 1))
    return torch.where(x.isnan(), fmt.nan_code, codes).to(torch.uint8)


def decode(codes: Tensor, fmt: ElementFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 codes (one per byte; for FP6 and FP4 the upper bits must be zero), same
    shape, exact in BF16 and float32.
    """
    if fmt.float8 is not None:
        return codes.contiguous().view(fmt.float8).to(dtype)
    code = codes.to(torch.int32)
    unsigned = code & (fmt.sign_bit - 1)
    values = magnitude(unsigned, fmt)
    if fmt.has_nan:
        values = torch.where(unsigned > fmt.last_number_code, math.nan, values)
    if fmt.has_inf:
        values = torch.where(unsigned == fmt.infinity_code, math.inf, values)
    return torch.where((code & fmt.sign_bit) > 0, -values, values).to(dtype)


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., C] -> bytes [..., C/2]. C must be even."""
    if codes.shape[-1] % 2:
        raise ValueError(
            f"codes: {codes.shape[-1]} columns cannot be packed two per byte; the last axis "
            "must be even"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes [..., C/2] -> uint8 codes 0..15 [..., C]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
