"""Constants that the Triton kernels are compiled for."""

from dataclasses import dataclass


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
    turned: whether codes of columns are stored as x lies, [tokens, features], and not transposed.
    mantissa, min_exponent, max_exponent, code_bits: of the element format, code_bits without the
        sign.
    largest, nan_code: its largest value and the code of NaN; nan_value: what rounds to that code;
        nan_above: larger codes are NaN.
    stochastic: rounding by random bits.
    scale: "e4m3" (TE >= 2.14's formula), "e4m3_te2.13", "e8m0_rceil", "e8m0_floor", "e8m0_even",
        "e8m0_ceil", "fp32", "pow2".
    signed_zero: whether a negative zero keeps its sign; TE codes it as zero under E4M3 scales.
    outer: extent of the global scale of blocks, or of the one float32 scale: "none", "tensor",
        "row".
    bound: S_enc = bound / amax. range, inverse_range: the magnitude that a block's amax is scaled
        to.
    if_infinite: a float32 scale where (largest / amax) / 2^margin is infinite; inverse_margin:
        2^-margin.
    given: whether the amax of a float32 scale came from elsewhere, so that x may exceed it.
    enters: whether the amax of x is joined to one in memory.
    size: of the Hadamard transform, 0 for none; bit i of negative: sign i is -1; factor:
        1/sqrt(size).
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
    turned: bool = False
    mantissa: int = 0
    min_exponent: int = 0
    max_exponent: int = 0
    code_bits: int = 0
    largest: float = 0.0
    nan_code: int = 0
    nan_value: float = 0.0
    nan_above: int = 0
    stochastic: bool = False
    scale: str = "fp32"
    signed_zero: bool = True
    outer: str = "none"
    bound: float = 0.0
    range: float = 0.0
    inverse_range: float = 0.0
    if_infinite: float = 0.0
    inverse_margin: float = 1.0
    given: bool = False
    enters: bool = False
    size: int = 0
    negative: int = 0
    factor: float = 1.0
