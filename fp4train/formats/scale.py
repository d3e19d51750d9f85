"""Scale formats: how scales are stored.

E4M3 (NVFP4) is the non-negative half of the element format. E8M0 (OCP MX v1.0, section 5.4.1) is an
exponent: byte b means 2^(b-127), 255 is NaN; no zero, no sign; 2^-127 is a float32 subnormal, 2^127
its largest power of two. FP32 and POW2 are float32 numbers: the scale that multiplies x is rounded,
and its inverse is stored. `fp4train.formats` lists all formats; `quantize/scaling.py` computes
scales from an amax.

UE5M3 has 5 exponent and 3 mantissa bits: the sign bit of E4M3 becomes range. It was proposed for
FP4 block scales in "Is Finer Better? The Limits of Microscaling Formats in Large Language Models"
(Fasoli et al., arXiv 2601.19026): with 33 binades of normal numbers it needs no global scale, hence
no amax of the tensor, and it keeps the precision of E4M3. Bias 15, smallest value 2^-17; rounding
is to nearest, ties to even. There are two codebooks, with the same values up to 61440:

    ue5m3       as E4M3: one NaN, the code of all ones; largest value 1.75 * 2^16 = 114688 (AMD)
    ue5m3_ieee  as E5M2: the exponent of all ones is reserved; largest value 1.875 * 2^15 = 61440
                (arXiv 2609.02846). No scale is infinite, so its eight reserved codes are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4train.formats.element import (
    E4M3,
    FP32,
    ElementFormat,
    encode,
    magnitude,
)

E8M0_NAN = 255
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127
"""What values of a format of scales with a mantissa must lie between: normal numbers of BF16."""
BF16_SIGNIFICANT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class ScaleFormat:
    """A format of scales, all >= 0.

    name: value of `QuantSpec.scale`.
    dtype: storage dtype: uint8 (one byte per scale) or float32.
    mantissa_bits: explicit bits; 0 for powers of two.
    smallest, smallest_normal, max: positive finite values.
    needs_global: whether its range is too small for a whole tensor, so that it needs a global
        scale.
    roundings: values of `QuantSpec.scale_rounding` that round to a power of two, the default first;
        empty if there is only one way.
    encode: float32 values >= 0 -> stored scales of the same shape; NaN stays NaN. The rounding
        direction depends on the format: see its function.
    decode: stored scales -> float32 values, exact.
    element: the element format whose codes without sign stand for scales, rounded to nearest, ties
        to even; None: they are stored otherwise.
    """

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    smallest: float
    smallest_normal: float
    max: float
    needs_global: bool = False
    roundings: tuple[str, ...] = ()
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    element: ElementFormat | None = None

    @classmethod
    def unsigned(
        cls,
        *,
        name: str,
        exponent_bits: int,
        mantissa_bits: int,
        bias: int,
        needs_global: bool,
        ieee: bool = False,
    ) -> ScaleFormat:
        """A byte of exponent and mantissa without sign, whose code of all ones is NaN; a scale is
        rounded to nearest, ties to even.

        Args:
            needs_global: the field of that name.
            ieee: whether all codes whose exponent is all ones are reserved; each decodes to NaN.

        Raises:
            ValueError: a field has another type, they have not 8 bits, or values are not exact in
                BF16.
        """
        for field, value in (
            ("exponent_bits", exponent_bits),
            ("mantissa_bits", mantissa_bits),
            ("bias", bias),
        ):
            if type(value) is not int:
                raise ValueError(f"scale format {name!r}: {field}={value!r} must be an integer")
        for field, value in (("needs_global", needs_global), ("ieee", ieee)):
            if type(value) is not bool:
                raise ValueError(f"scale format {name!r}: {field}={value!r} must be true or false")
        element = ElementFormat(
            name=name,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            bias=bias,
            has_inf=ieee,
            has_nan=True,
        )
        if exponent_bits + mantissa_bits != 8 or not 1 <= mantissa_bits <= 7:
            raise ValueError(
                f"scale format {name!r}: exponent_bits={exponent_bits} and "
                f"mantissa_bits={mantissa_bits} must be 8 bits together, 1 to 7 of them the "
                "mantissa's (e8m0 has powers of two)"
            )
        if element.smallest_subnormal < SMALLEST_SCALE or element.max > LARGEST_SCALE:
            raise ValueError(
                f"scale format {name!r}: its values reach from {element.smallest_subnormal:.3g} to "
                f"{element.max:.3g}, beyond those of BF16: choose another bias than {bias}"
            )
        return _scale_of(
            element,
            needs_global=needs_global,
            encode=partial(encode, fmt=element),
            decode=partial(_decode_unsigned, element=element),
        )

    @property
    def is_byte(self) -> bool:
        """Whether a scale is one byte, applied to the decoded element. A float32 scale of a row or
        tensor is applied to the product.
        """
        return self.dtype == torch.uint8

    @property
    def rounds_to_nearest(self) -> bool:
        """Whether its bytes are the codes of `element` by this module's own functions, so that a
        kernel which knows the fields of `element` has its bits.
        """
        if self.element is None or self.roundings or not self.is_byte:
            return False
        if self.encode is e4m3_encode and self.decode is e4m3_decode:
            return self.element == E4M3
        functions = self.encode, self.decode
        return all(isinstance(function, partial) for function in functions) and (
            _called(self.encode) == (encode, {"fmt": self.element})
            and _called(self.decode) == (_decode_unsigned, {"element": self.element})
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of the scales of a block."""
        return self.dtype.itemsize

    def factors(self, stored: Tensor) -> Tensor:
        """The factors of stored scales, float32, one for each block, or for each part of it."""
        return self.decode(stored)

    def why_not(self, spec: Any) -> str | None:
        """Why such scales cannot be those of a QuantSpec with these elements, blocks and options;
        None if they can.
        """
        return None

    @property
    def takes_global(self) -> bool:
        """Whether block scales can lie under a global scale: bytes with a mantissa."""
        return self.is_byte and self.mantissa_bits > 0

    def exact_in_bf16(self, element: ElementFormat) -> bool:
        """Whether every element times every scale has few enough significant bits for BF16.

        A product of p and q significant bits has p + q at most; a power of two adds none.
        """
        scale_bits = self.mantissa_bits + 1 if self.mantissa_bits else 0
        return element.mantissa_bits + 1 + scale_bits <= BF16_SIGNIFICANT_BITS


def check_scale(fmt: ScaleFormat) -> None:
    """Refuse a format in which scales cannot be stored.

    Raises:
        ValueError: a field has another type, it stores neither bytes nor float32 numbers, or its
            largest and smallest values are not stored exactly.
    """
    place = f"scale format {fmt.name!r}"
    if fmt.dtype not in (torch.uint8, torch.float32):
        raise ValueError(f"{place}: dtype={fmt.dtype}: scales are torch.uint8 or torch.float32")
    if type(fmt.mantissa_bits) is not int or fmt.mantissa_bits < 0:
        raise ValueError(f"{place}: mantissa_bits={fmt.mantissa_bits!r} must be an integer ≥ 0")
    for field in ("smallest", "smallest_normal", "max"):
        value = getattr(fmt, field)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{place}: {field}={value!r} must be a finite number above zero")
    for field in ("encode", "decode"):
        if not callable(getattr(fmt, field)):
            raise ValueError(f"{place}: {field}={getattr(fmt, field)!r} must be a function")
    ends = torch.tensor([fmt.smallest, fmt.max], dtype=torch.float32)
    stored = fmt.encode(ends)
    if stored.dtype != fmt.dtype or not torch.equal(fmt.decode(stored), ends):
        raise ValueError(
            f"{place}: encode and decode do not give back smallest={fmt.smallest:g} and "
            f"max={fmt.max:g} as {fmt.dtype}"
        )


def e4m3_encode(x: Tensor) -> Tensor:
    """Bytes of the nearest E4M3 value, ties to even, saturating at 448; NaN gives 0x7f. x float32
    and >= 0.
    """
    return x.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8) & 0x7F


def e4m3_decode(codes: Tensor) -> Tensor:
    """Float32 value of each E4M3 byte. Exact."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def e8m0_encode(x: Tensor) -> Tensor:
    """Bytes of the smallest power of two >= x (round up, as PTX `cvt.rp.satfinite.ue8m0x2.f32`), x
    float32 and >= 0.

    0 and everything up to 2^-127 give 0; above 2^127 saturates at 254; NaN and infinity give 255
    (they are never hidden).
    """
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    # Subnormals: up to 2^-127 (half of the smallest normal) is byte 0, the rest byte 1.
    mantissa = bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return torch.where(x.isfinite(), (exponent + up).clamp_(max=254), E8M0_NAN).to(torch.uint8)


def e8m0_decode(codes: Tensor) -> Tensor:
    """Float32 value 2^(b-127) of each uint8 byte b; NaN for 255. Exact."""
    byte = codes.to(torch.int32)
    # The byte is float32's exponent; byte 0 is the subnormal 2^-127.
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == E8M0_NAN, math.nan, bits.view(torch.float32))


def _decode_unsigned(codes: Tensor, element: ElementFormat) -> Tensor:
    """Float32 value of each byte without sign; NaN for the reserved codes. Exact."""
    code = codes.to(torch.int32)
    reserved = element.infinity_code if element.has_inf else element.nan_code
    return torch.where(code >= reserved, math.nan, magnitude(code, element))


def _called(function: Any) -> tuple[Any, dict[str, Any]]:
    """What a partial function calls, and by which words."""
    return function.func, function.keywords


def _unchanged(x: Tensor) -> Tensor:
    return x


def pow2_encode(x: Tensor) -> Tensor:
    """The largest power of two <= x (mantissa bits cleared), x float32 and >= 0; subnormals become
    0.
    """
    return torch.where(x.isnan(), x, (x.view(torch.int32) & 0x7F800000).view(torch.float32))


def _scale_of(element: ElementFormat, dtype: torch.dtype = torch.uint8, **its: Any) -> ScaleFormat:
    """The non-negative half of an element format, as a format of scales."""
    return ScaleFormat(
        name=element.name,
        dtype=dtype,
        element=element if dtype == torch.uint8 else None,
        mantissa_bits=element.mantissa_bits,
        smallest=element.smallest_subnormal,
        smallest_normal=element.smallest_normal,
        max=element.max,
        **its,
    )


E4M3_SCALE = _scale_of(E4M3, needs_global=True, encode=e4m3_encode, decode=e4m3_decode)
UE5M3_SCALE = ScaleFormat.unsigned(
    name="ue5m3", exponent_bits=5, mantissa_bits=3, bias=15, needs_global=False
)
UE5M3_IEEE_SCALE = ScaleFormat.unsigned(
    name="ue5m3_ieee", exponent_bits=5, mantissa_bits=3, bias=15, needs_global=False, ieee=True
)
FP32_SCALE = _scale_of(FP32, torch.float32, encode=_unchanged, decode=_unchanged)
POW2_SCALE = replace(
    FP32_SCALE, name="pow2", mantissa_bits=0, smallest=2.0**-126, max=2.0**127, encode=pow2_encode
)
E8M0_SCALE = ScaleFormat(
    name="e8m0",
    dtype=torch.uint8,
    mantissa_bits=0,
    smallest=2.0**-127,
    smallest_normal=2.0**-127,
    max=2.0**127,
    roundings=("rceil", "floor", "even", "ceil"),
    encode=e8m0_encode,
    decode=e8m0_decode,
)
