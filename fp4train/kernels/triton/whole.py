"""One float32 scale a tensor or a row (FP8 current, delayed, per row): t = x * scale, codes or values without the
scale.

The amax is given (from amax.py, or from history); scale and its inverse are computed in each program, the inverse
stored once. Where the amax came from elsewhere x may exceed it: large values saturate, but an infinity becomes NaN.
Bytes an element: 3 for codes of BF16.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_bf16, as_float
from fp4train.kernels.triton.element import code_limit, element_codes, element_values
from fp4train.kernels.triton.philox import eight_fractions, random_words
from fp4train.kernels.triton.scale import float_scales

_WORDS = ["key0", "key1", "counter2", "counter3", "col_group", "row_offset"]


@triton.jit(do_not_specialize=_WORDS)
def quantize_whole(
    x_ptr,
    amax_ptr,
    out_ptr,
    inverse_ptr,
    rows,
    cols,
    tiles,
    width,
    x_stride,
    out_stride,
    key0,
    key1,
    counter2,
    counter3,
    col_group,
    row_offset,
    POW2: tl.constexpr,
    PER_ROW: tl.constexpr,
    GIVEN: tl.constexpr,
    INVERSE_MARGIN: tl.constexpr,
    IF_INFINITE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NAN_VALUE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    OUTPUT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x [rows, cols], column stride 1. inverse_ptr: scale_inv, [1] or [rows]. A program takes ROWS rows of GROUPS
    times eight columns. width: columns of the output; out_stride counts int32 words where OUTPUT is packed."""
    tile_col = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    eight = tile_col * GROUPS + tl.arange(0, GROUPS)
    j = tl.arange(0, 8)
    col = (eight * 8)[None, :, None] + j[None, None, :]
    row64 = row.to(tl.int64)
    in_rows = (row < rows)[:, None, None]
    x = as_float(tl.load(x_ptr + (row64 * x_stride)[:, None, None] + col, mask=in_rows & (col < cols), other=0.0))
    if PER_ROW:
        amax = tl.load(amax_ptr + row, mask=row < rows, other=0.0)
        scale, inverse = float_scales(amax, POW2, MAX, INVERSE_MARGIN, IF_INFINITE)
        if tile_col == 0:
            tl.store(inverse_ptr + row, inverse, mask=row < rows)
        scale = scale[:, None, None]
    else:
        scale, inverse = float_scales(tl.load(amax_ptr), POW2, MAX, INVERSE_MARGIN, IF_INFINITE)
        tl.store(inverse_ptr, inverse, mask=tl.program_id(0) == 0)
    t = x * scale
    if GIVEN:
        t = tl.where(tl.abs(x) < float("inf"), t, float("nan"))

    r = 0.0
    if STOCHASTIC:
        w0, w1, w2, w3 = random_words(
            eight[None, :], row[:, None], 0, key0, key1, counter2, counter3, col_group, row_offset
        )
        r = eight_fractions(w0, w1, w2, w3)

    out_row = (row64 * out_stride)[:, None]
    if OUTPUT == "values":
        v = element_values(t, r, MANTISSA, MIN_EXPONENT, CODE_BITS, MAX, True, STOCHASTIC)
        tl.store(out_ptr + out_row[:, :, None] + col, as_bf16(v, HARDWARE), mask=in_rows & (col < width))
    else:
        limit = code_limit(scale, MAX, NAN_VALUE)
        if GIVEN:
            limit = tl.where(t == t, limit, NAN_VALUE)
        code = element_codes(t, r, limit, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_CODE, STOCHASTIC, HARDWARE)
        tl.store(out_ptr + out_row[:, :, None] + col, code.to(tl.uint8), mask=in_rows & (col < width))
