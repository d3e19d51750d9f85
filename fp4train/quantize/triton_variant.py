"""Constants that the Triton kernels are compiled for, and those of a spec."""

import math
from dataclasses import dataclass, replace

import torch

from fp4train.formats import E2M1, E4M3, E5M2, AdaptiveScale, LevelledScale
from fp4train.quantize.rounding import (
    FEW_BITS,
    MIDPOINT,
    NEAREST,
    NEAREST_AWAY,
    RANDOM_BITS,
    STOCHASTIC,
    FewBits,
)
from fp4train.quantize.scaling import element_range
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard, hadamard_signs


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The element format, and how values are rounded to it.

    mantissa, min_exponent, max_exponent, code_bits: of the format, code_bits without the sign.
    largest, nan_code: its largest value and the code of NaN; nan_value: what rounds to that code;
        nan_above: larger codes are NaN.
    rounding: "nearest", "nearest_away", "stochastic", "carry" (the same, of E2M1), "few_bits",
        "midpoint". random_bits: of an element.
    cast: "e4m3" or "e5m2", formats to which GPUs cast from SM 8.9 on; "" of others.
    """

    mantissa: int = 0
    min_exponent: int = 0
    max_exponent: int = 0
    code_bits: int = 0
    largest: float = 0.0
    nan_code: int = 0
    nan_value: float = 0.0
    nan_above: int = 0
    rounding: str = "nearest"
    random_bits: int = 0
    cast: str = ""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scales of blocks, or the one float32 scale.

    kind: "unsigned" (a byte with a mantissa; TE >= 2.14's formula), "unsigned_divided" (TE <=
        2.13's, and that without a global scale), "e8m0_rceil", "e8m0_floor", "e8m0_even",
        "e8m0_ceil", "fp32", "pow2", "levels" (HiF4); of codes that are decoded "unsigned", "e8m0",
        "fp32", "pow2".
    mantissa, min_exponent, bits, largest: of an unsigned scale, all its bits ones for NaN;
        nan_above: larger bytes are NaN. cast: whether they are those of the hardware's cast to E4M3.
    signed_zero: whether a negative zero keeps its sign; TE codes it as zero under E4M3 scales.
    bound: S_enc = bound / amax. range, inverse_range: the magnitude that a block's amax is scaled
        to. guard: what elements under E8M0 scales are multiplied by besides.
    if_infinite: a float32 scale where (largest / amax) / 2^margin is infinite; inverse_margin:
        2^-margin.
    """

    kind: str = "fp32"
    mantissa: int = 0
    min_exponent: int = 0
    bits: int = 0
    largest: float = 0.0
    nan_above: int = 0
    cast: bool = False
    signed_zero: bool = True
    bound: float = 0.0
    range: float = 0.0
    inverse_range: float = 0.0
    guard: float = 1.0
    if_infinite: float = 0.0
    inverse_margin: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Integers:
    """The grid of integers that blocks may take.

    step: value of the integer 1, 0 where blocks take none; inverse_step: 1 / step.
    largest, mantissa, min_exponent: of its format.
    """

    step: float = 0.0
    inverse_step: float = 0.0
    largest: float = 0.0
    mantissa: int = 0
    min_exponent: int = 0


@dataclass(frozen=True, kw_only=True)
class OuterExtent:
    """What shares the global scale of blocks, or the one float32 scale.

    kind: "none", "tensor", "row", or "extent", of rows and cols, all of them where that is 0.
    macro: whether the scale of an extent is a mantissa over E8M0 block scales.
    """

    kind: str = "none"
    rows: int = 1
    cols: int = 0
    macro: bool = False


@dataclass(frozen=True, kw_only=True)
class TransformConstants:
    """The Hadamard transform of groups of values.

    size: 0 for none; bit i of negative: sign i is -1; draws_signs: whether they are drawn for each
        step; factor: 1/sqrt(size). parts: blocks that a group spans.
    """

    size: int = 0
    parts: int = 1
    negative: int = 0
    draws_signs: bool = False
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Constants that a kernel is compiled for, as one argument V: one spec, one dtype of x, one
    kind of output.

    Kernels read its fields, and theirs, while they are compiled.

    Only plain values, and no properties: Triton's caches know a variant by its `repr`. What a
    kernel does not read keeps its default, so that specs which differ only there share a compiled
    kernel.

    n: columns of a block; height: its rows. tile_rows, tile_blocks: rows, and blocks of each, of a
        program.
    hardware: whether the kernel is compiled; the interpreter rounds float32 to BF16 otherwise than
        GPUs do.
    blocks: which function quantises: "rows", "rows16", "squares", "whole", "columns".
    output: "codes" (one per byte), "packed" (E2M1: two per byte, stored as words) or "values"
        (element * block scale).
    tiled: whether scales are stored in tiles of 128x4.
    given: whether the amax of a float32 scale came from elsewhere, so that x may exceed it.
    enters: whether the amax of x is joined to one in memory.
    factor: whether the factor of a product is stored beside S_dec.
    """

    n: int
    tile_rows: int
    tile_blocks: int
    hardware: bool
    blocks: str = "rows"
    output: str = "values"
    height: int = 1
    tiled: bool = False
    given: bool = False
    enters: bool = False
    factor: bool = False
    element: Elements = Elements()
    scale: Scales = Scales()
    integers: Integers = Integers()
    outer: OuterExtent = OuterExtent()
    transform: TransformConstants = TransformConstants()


ROUNDINGS = (NEAREST, NEAREST_AWAY, STOCHASTIC, *FEW_BITS, MIDPOINT)
"""Roundings that the kernels know."""


def of_elements(spec: QuantSpec) -> Elements:
    """The elements of codes by `spec`, and their rounding."""
    fmt = spec.format
    rounding = spec.rounder
    name, bits = rounding.name, RANDOM_BITS
    if isinstance(rounding, FewBits):
        name = "midpoint" if rounding == MIDPOINT else "few_bits"
        bits = rounding.bits
    elif (
        rounding == STOCHASTIC and fmt == E2M1 and not isinstance(spec.scale_format, AdaptiveScale)
    ):
        name = "carry"
    return Elements(
        mantissa=fmt.mantissa_bits,
        min_exponent=fmt.min_exponent,
        max_exponent=fmt.max_exponent,
        code_bits=fmt.bits - 1,
        largest=fmt.max,
        nan_code=fmt.nan_code,
        nan_value=fmt.magnitude_of(fmt.nan_code),
        rounding=name,
        random_bits=bits if rounding.random else 0,
        cast=fmt.name if fmt in (E4M3, E5M2) else "",
    )


def of_scales(spec: QuantSpec, dtype: torch.dtype) -> Scales:
    """The scales of x of `dtype`; in float32 arithmetic, as in `quantize.scaling`."""
    bound = torch.tensor(spec.global_bound * element_range(spec), dtype=torch.float32)
    largest = torch.tensor(element_range(spec), dtype=torch.float32)
    kind = spec.scale
    if isinstance(spec.scale_format, LevelledScale):
        kind = "levels"
    elif spec.scale_format.roundings:
        kind = f"{kind}_{spec.scale_rounding}"
    elif spec.scale_format.takes_global:
        divided = spec.formula == "te2.13" or spec.global_scale is None
        kind = "unsigned_divided" if divided else "unsigned"
    return replace(
        unsigned_scale(spec),
        kind=kind,
        signed_zero=not spec.scale_format.takes_global,
        bound=bound.item(),
        range=largest.item(),
        inverse_range=largest.reciprocal().item(),
        guard=1.0 if spec.product_factor is None else spec.guard,
        if_infinite=torch.finfo(dtype).max,
        inverse_margin=2.0 ** -(spec.delayed.margin if spec.delayed else 0),
    )


def unsigned_scale(spec: QuantSpec) -> Scales:
    """What describes bytes with a mantissa; nothing of other scales."""
    element = spec.scale_format.element
    if element is None:
        return Scales()
    last = element.infinity_code - 1 if element.has_inf else element.nan_code - element.has_nan
    return Scales(
        kind="unsigned",
        mantissa=element.mantissa_bits,
        min_exponent=element.min_exponent,
        bits=element.bits - 1,
        largest=element.max,
        nan_above=last,
        cast=element == E4M3,
    )


def scales_of_codes(spec: QuantSpec) -> Scales:
    """The scales of codes that are decoded: those of blocks."""
    if spec.outer is not None:
        return Scales()  # those of blocks, times those above
    if spec.scale_format.element is not None:
        return replace(unsigned_scale(spec), cast=False)
    return Scales(kind=spec.scale)


def other_grid(spec: QuantSpec) -> Integers:
    """The grid of integers that blocks may take."""
    fmt = spec.scale_format
    if not isinstance(fmt, AdaptiveScale):
        return Integers()
    return Integers(
        step=torch.tensor(fmt.step, dtype=torch.float32).item(),
        inverse_step=torch.tensor(1.0 / fmt.step, dtype=torch.float32).item(),
        largest=fmt.other.max,
        mantissa=fmt.other.mantissa_bits,
        min_exponent=fmt.other.min_exponent,
    )


def outer_extent(spec: QuantSpec) -> OuterExtent:
    """What shares a scale above block scales, or the one float32 scale."""
    if spec.block[1] is None:
        return OuterExtent(kind="tensor" if spec.block[0] is None else "row")
    if spec.extent is None or spec.global_scale == "row":
        return OuterExtent(kind=str(spec.global_scale or "none"))
    rows, columns = spec.extent
    macro = spec.global_scale == "macro"
    return OuterExtent(kind="extent", rows=rows, cols=columns or 0, macro=macro)


def of_transform(spec: QuantSpec) -> TransformConstants:
    """The Hadamard transform of a spec."""
    if spec.hadamard is None:
        return TransformConstants()
    size = spec.hadamard.size
    transform = TransformConstants(size=size, parts=parts(spec), factor=1.0 / math.sqrt(size))
    if draws_signs(spec):
        return replace(transform, draws_signs=True)
    signs = hadamard_signs(spec.hadamard)
    return replace(transform, negative=sum(1 << i for i, sign in enumerate(signs) if sign < 0))


def parts(spec: QuantSpec) -> int:
    """Blocks that a group of the transform spans."""
    if spec.hadamard is None or spec.block[1] is None:
        return 1
    return max(1, spec.hadamard.size // spec.block[1])


def draws_signs(spec: QuantSpec) -> bool:
    """Whether the signs of the transform are drawn for each step."""
    return isinstance(spec.hadamard, Hadamard) and spec.hadamard.signs == "step"
