"""Constants that the Triton kernels are compiled for, and those of a spec."""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from fp4train.formats import AdaptiveScale, LevelledScale
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
class Variant:
    """Constants that a kernel is compiled for, as one argument V: one spec, one dtype of x, one
    kind of output.

    Kernels read its fields while they are compiled.

    Only plain values, and no properties: Triton's caches know a variant by its `repr`. What a
        kernel does not read
    keeps its default, so that specs which differ only there share a compiled kernel.

    blocks: which function quantises: "rows", "rows16", "squares", "whole", "columns".
    output: "codes" (one per byte), "packed" (E2M1: two per byte, stored as words) or "values"
        (element * block scale).
    n: columns of a block; height: its rows. tile_rows, tile_blocks: rows, and blocks of each, of a
        program.
    tiled: whether scales are stored in tiles of 128x4.
    mantissa, min_exponent, max_exponent, code_bits: of the element format, code_bits without the
        sign.
    largest, nan_code: its largest value and the code of NaN; nan_value: what rounds to that code;
        nan_above: larger codes are NaN.
    rounding: "nearest", "nearest_away", "stochastic", "few_bits", "midpoint". random_bits: of an
        element.
    scale: "unsigned" (a byte with a mantissa; TE >= 2.14's formula), "unsigned_divided" (TE <=
        2.13's, and that without a global scale), "e8m0_rceil", "e8m0_floor", "e8m0_even",
        "e8m0_ceil", "fp32", "pow2", "levels" (HiF4); of codes that are decoded "unsigned", "e8m0",
        "fp32", "pow2".
    scale_mantissa, scale_min_exponent, scale_bits, scale_largest: of an unsigned scale, all its
        bits ones for NaN; scale_nan_above: larger bytes are NaN.
    step: value of the integer 1 where blocks may hold integers, else 0; inverse_step: 1 / step.
    other_largest, other_mantissa, other_min_exponent: fields of the format of integers.
    signed_zero: whether a negative zero keeps its sign; TE codes it as zero under E4M3 scales.
    outer: extent of the global scale of blocks, or of the one float32 scale: "none", "tensor",
        "row", or "extent", of outer_rows and outer_cols, all of them where that is 0.
    macro: whether the scale of an extent is a mantissa over E8M0 block scales.
    bound: S_enc = bound / amax. range, inverse_range: the magnitude that a block's amax is scaled
        to. guard: what elements under E8M0 scales are multiplied by besides.
    if_infinite: a float32 scale where (largest / amax) / 2^margin is infinite; inverse_margin:
        2^-margin.
    given: whether the amax of a float32 scale came from elsewhere, so that x may exceed it.
    enters: whether the amax of x is joined to one in memory.
    size: of the Hadamard transform, 0 for none; bit i of negative: sign i is -1; draws_signs:
        whether they are drawn for each step; factor: 1/sqrt(size). parts: blocks that it spans.
    hardware: whether the kernel is compiled; the interpreter rounds float32 to BF16 otherwise than
        GPUs do.
    """

    n: int
    tile_rows: int
    tile_blocks: int
    hardware: bool
    blocks: str = "rows"
    output: str = "values"
    height: int = 1
    tiled: bool = False
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
    scale: str = "fp32"
    scale_mantissa: int = 0
    scale_min_exponent: int = 0
    scale_bits: int = 0
    scale_largest: float = 0.0
    scale_nan_above: int = 0
    step: float = 0.0
    inverse_step: float = 0.0
    other_largest: float = 0.0
    other_mantissa: int = 0
    other_min_exponent: int = 0
    signed_zero: bool = True
    outer: str = "none"
    outer_rows: int = 1
    outer_cols: int = 0
    macro: bool = False
    bound: float = 0.0
    range: float = 0.0
    inverse_range: float = 0.0
    guard: float = 1.0
    if_infinite: float = 0.0
    inverse_margin: float = 1.0
    given: bool = False
    enters: bool = False
    size: int = 0
    parts: int = 1
    negative: int = 0
    draws_signs: bool = False
    factor: float = 1.0


ROUNDINGS: Final = (NEAREST, NEAREST_AWAY, STOCHASTIC, *FEW_BITS, MIDPOINT)
"""Roundings that the kernels know."""


def of_elements(spec: QuantSpec) -> dict[str, Any]:
    """The fields that describe elements and their rounding."""
    fmt = spec.format
    rounding = spec.rounder
    name, bits = rounding.name, RANDOM_BITS
    if isinstance(rounding, FewBits):
        name = "midpoint" if rounding == MIDPOINT else "few_bits"
        bits = rounding.bits
    return {
        "mantissa": fmt.mantissa_bits,
        "min_exponent": fmt.min_exponent,
        "max_exponent": fmt.max_exponent,
        "code_bits": fmt.bits - 1,
        "largest": fmt.max,
        "nan_code": fmt.nan_code,
        "nan_value": fmt.magnitude_of(fmt.nan_code),
        "rounding": name,
        "random_bits": bits if rounding.random else 0,
    }


def of_scales(spec: QuantSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The fields that describe scales of x of `dtype`; in float32 arithmetic, as in
    `quantize.scaling`.
    """
    bound = torch.tensor(spec.global_bound * element_range(spec), dtype=torch.float32)
    largest = torch.tensor(element_range(spec), dtype=torch.float32)
    scale = spec.scale
    if isinstance(spec.scale_format, LevelledScale):
        scale = "levels"
    elif spec.scale_format.roundings:
        scale = f"{scale}_{spec.scale_rounding}"
    elif spec.scale_format.takes_global:
        divided = spec.formula == "te2.13" or spec.global_scale is None
        scale = "unsigned_divided" if divided else "unsigned"
    return {
        **unsigned_scale(spec),
        **other_grid(spec),
        **outer_extent(spec),
        "scale": scale,
        "signed_zero": not spec.scale_format.takes_global,
        "bound": bound.item(),
        "range": largest.item(),
        "inverse_range": largest.reciprocal().item(),
        "guard": 1.0 if spec.product_factor is None else spec.guard,
        "if_infinite": torch.finfo(dtype).max,
        "inverse_margin": 2.0 ** -(spec.delayed.margin if spec.delayed else 0),
    }


def unsigned_scale(spec: QuantSpec) -> dict[str, Any]:
    """The fields that describe bytes with a mantissa; none of other scales."""
    element = spec.scale_format.element
    if element is None:
        return {}
    last = element.infinity_code - 1 if element.has_inf else element.nan_code - element.has_nan
    return {
        "scale_mantissa": element.mantissa_bits,
        "scale_min_exponent": element.min_exponent,
        "scale_bits": element.bits - 1,
        "scale_largest": element.max,
        "scale_nan_above": last,
    }


def other_grid(spec: QuantSpec) -> dict[str, Any]:
    """The fields that describe the grid of integers that blocks may take; none if they may not."""
    fmt = spec.scale_format
    if not isinstance(fmt, AdaptiveScale):
        return {}
    return {
        "step": torch.tensor(fmt.step, dtype=torch.float32).item(),
        "inverse_step": torch.tensor(1.0 / fmt.step, dtype=torch.float32).item(),
        "other_largest": fmt.other.max,
        "other_mantissa": fmt.other.mantissa_bits,
        "other_min_exponent": fmt.other.min_exponent,
    }


def outer_extent(spec: QuantSpec) -> dict[str, Any]:
    """The fields that say what shares a scale above block scales, or the one float32 scale."""
    if spec.block[1] is None:
        return {"outer": "tensor" if spec.block[0] is None else "row"}
    if spec.extent is None or spec.global_scale == "row":
        return {"outer": spec.global_scale or "none"}
    rows, columns = spec.extent
    macro = spec.global_scale == "macro"
    return {"outer": "extent", "outer_rows": rows, "outer_cols": columns or 0, "macro": macro}


def of_transform(spec: QuantSpec) -> dict[str, Any]:
    """The fields that describe the Hadamard transform; none without one."""
    if spec.hadamard is None:
        return {}
    size = spec.hadamard.size
    fields = {"size": size, "parts": parts(spec), "factor": 1.0 / math.sqrt(size)}
    if draws_signs(spec):
        return fields | {"draws_signs": True}
    signs = hadamard_signs(spec.hadamard)
    return fields | {"negative": sum(1 << i for i, sign in enumerate(signs) if sign < 0)}


def parts(spec: QuantSpec) -> int:
    """Blocks that a group of the transform spans."""
    if spec.hadamard is None or spec.block[1] is None:
        return 1
    return max(1, spec.hadamard.size // spec.block[1])


def draws_signs(spec: QuantSpec) -> bool:
    """Whether the signs of the transform are drawn for each step."""
    return isinstance(spec.hadamard, Hadamard) and spec.hadamard.signs == "step"
