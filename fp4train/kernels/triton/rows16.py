"""NVFP4's packed codes: 1x16 E2M1 blocks along contiguous columns, a block a thread.

The same result as rows.py with OUTPUT "packed". There two threads share a block and both compute its scale, which is
a sixth of the instructions, and this kernel is bound by them on an H200 (12 integer instructions an element at half
rate, for 2.56 bytes). Here a thread loads its block in two pieces of 16 bytes, computes one scale, and stores one
word of 16 codes; neighbouring threads store neighbouring words.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_float, largest, largest_of_eight
from fp4train.kernels.triton.element import code_limit, element_codes
from fp4train.kernels.triton.philox import eight_fractions, random_words
from fp4train.kernels.triton.scale import block_scales, global_scales

_WORDS = ["key0", "key1", "counter2", "counter3", "col_group", "row_offset"]


@triton.jit(do_not_specialize=_WORDS)
def quantize_rows16(
    x_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    decode_ptr,
    rows,
    cols,
    groups,
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
    SCALE: tl.constexpr,
    GLOBAL: tl.constexpr,
    BOUND: tl.constexpr,
    RANGE: tl.constexpr,
    INVERSE_RANGE: tl.constexpr,
    IF_INFINITE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NAN_VALUE: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OUTPUT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """As `quantize_rows`, N = 16. out_ptr: int64 words of sixteen codes, [rows, groups]."""
    tile_row = tl.program_id(0) // tiles
    tile_col = tl.program_id(0) % tiles
    i = tl.arange(0, ROWS * BLOCKS)
    row = tile_row * ROWS + i // BLOCKS
    group = tile_col * BLOCKS + i % BLOCKS
    inside = (row < rows) & (group < groups)
    row64 = row.to(tl.int64)
    j = tl.arange(0, 8)[None, None, :]
    first = x_ptr + (row64 * x_stride)[:, None, None]
    x = ()
    for half in tl.static_range(2):
        col = (group * 16)[:, None, None] + (half * 8 + j)
        x = x + (as_float(tl.load(first + col, mask=(row < rows)[:, None, None] & (col < cols), other=0.0)),)

    s_enc = 1.0
    s_dec = 1.0
    if GLOBAL == "tensor":
        s_enc, s_dec = global_scales(tl.load(amax_ptr), BOUND)
        tl.store(decode_ptr, s_dec, mask=tl.program_id(0) == 0)
    elif GLOBAL == "row":
        s_enc, s_dec = global_scales(tl.load(amax_ptr + row, mask=row < rows, other=0.0), BOUND)
        s_enc = s_enc[:, None]
        tl.store(decode_ptr + row, s_dec, mask=inside & (group == 0))
        s_dec = s_dec[:, None]
    amax_b = largest(largest_of_eight(x[0]), largest_of_eight(x[1]))
    stored, encode, _ = block_scales(
        amax_b, s_enc, s_dec, SCALE, MANTISSA, MAX, MAX_EXPONENT, RANGE, INVERSE_RANGE, IF_INFINITE
    )
    limit = code_limit(encode, MAX, NAN_VALUE)[:, :, None]
    anchor = amax_b.to(tl.uint32, bitcast=True) >> 31
    word = tl.zeros((ROWS * BLOCKS, 1), tl.uint64)
    for half in tl.static_range(2):
        t = x[half] * encode[:, :, None]
        if not SIGNED_ZERO:
            t = t + 0.0  # a negative zero is coded as zero, as in TE
        r = 0.0
        if STOCHASTIC:
            w0, w1, w2, w3 = random_words(
                (group * 2 + half)[:, None], row[:, None], anchor, key0, key1, counter2, counter3, col_group, row_offset
            )
            r = eight_fractions(w0, w1, w2, w3)
        code = element_codes(t, r, limit, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_CODE, STOCHASTIC, HARDWARE)
        word = word | (tl.sum(code << (4 * j).to(tl.uint32), 2).to(tl.uint64) << (32 * half))
    mask = inside[:, None]
    tl.store(out_ptr + (row64 * out_stride + group)[:, None], word.to(tl.int64, bitcast=True), mask=mask)
    tl.store(scale_ptr + (row64 * groups + group)[:, None], stored, mask=mask)
