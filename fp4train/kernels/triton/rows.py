"""1xN blocks along contiguous columns of x [R, C]: amax_b, scale, rounding and packing from one read.

A program takes ROWS x BLOCKS blocks as a tensor [ROWS*BLOCKS, N/8, 8]: eight neighbours lie in one thread, which
loads 16 bytes of BF16, makes one Philox call for them, and packs their E2M1 codes into one 32-bit word.

OUTPUT: codes (uint8 [R, Cp]), packed (int32 [R, Cp/8], eight E2M1 codes each, the first in the lowest nibble), or
values (BF16 or float32 [R, width]: element * block scale). Bytes an element, BF16 in: 2 + 0.5 + 1/16 for NVFP4's
codes, 4 for BF16 values.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_bf16, as_float, largest_along, largest_of_eight
from fp4train.kernels.triton.element import code_limit, element_codes, element_values
from fp4train.kernels.triton.philox import eight_fractions, random_words
from fp4train.kernels.triton.scale import block_scales, global_scales

_WORDS = ["key0", "key1", "counter2", "counter3", "col_group", "row_offset"]


@triton.jit(do_not_specialize=_WORDS)
def quantize_rows(
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
    """x [rows, cols], row stride x_stride, column stride 1. groups: blocks a row; tiles: programs across a row.
    GLOBAL: none, tensor, row. scale_ptr: [rows, groups] (not for values). decode_ptr: S_dec, [1] or [rows]. The six
    words are int32 bit patterns."""
    tile_row = tl.program_id(0) // tiles
    tile_col = tl.program_id(0) % tiles
    i = tl.arange(0, ROWS * BLOCKS)
    row = tile_row * ROWS + i // BLOCKS
    group = tile_col * BLOCKS + i % BLOCKS
    inside = (row < rows) & (group < groups)
    g = tl.arange(0, N // 8)
    j = tl.arange(0, 8)
    col = group[:, None, None] * N + (g * 8)[None, :, None] + j[None, None, :]
    row64 = row.to(tl.int64)
    x_offset = (row64 * x_stride)[:, None, None] + col
    x = as_float(tl.load(x_ptr + x_offset, mask=(row < rows)[:, None, None] & (col < cols), other=0.0))

    s_enc = 1.0
    s_dec = 1.0
    if GLOBAL == "tensor":
        s_enc, s_dec = global_scales(tl.load(amax_ptr), BOUND)
        tl.store(decode_ptr, s_dec, mask=tl.program_id(0) == 0)
    elif GLOBAL == "row":
        s_enc, s_dec = global_scales(tl.load(amax_ptr + row, mask=row < rows, other=0.0), BOUND)
        tl.store(decode_ptr + row, s_dec, mask=inside & (group == 0))
    amax_b = largest_along(largest_of_eight(x), 1)
    stored, encode, decode = block_scales(
        amax_b, s_enc, s_dec, SCALE, MANTISSA, MAX, MAX_EXPONENT, RANGE, INVERSE_RANGE, IF_INFINITE
    )
    t = x * encode[:, None, None]
    if not SIGNED_ZERO:
        t = t + 0.0  # a negative zero is coded as zero, as in TE

    r = 0.0
    if STOCHASTIC:
        w0, w1, w2, w3 = random_words(
            group[:, None] * (N // 8) + g[None, :],
            row[:, None],
            0,
            key0,
            key1,
            counter2,
            counter3,
            col_group,
            row_offset,
        )
        r = eight_fractions(w0, w1, w2, w3)

    out_row = (row64 * out_stride)[:, None]
    if OUTPUT == "values":
        v = element_values(t, r, MANTISSA, MIN_EXPONENT, CODE_BITS, MAX, SCALE == "fp32" or SCALE == "pow2", STOCHASTIC)
        v = v * decode[:, None, None]
        mask = (row < rows)[:, None, None] & (col < width)
        if out_ptr.dtype.element_ty == tl.bfloat16:
            v = as_bf16(v, HARDWARE)
        tl.store(out_ptr + out_row[:, :, None] + col, v, mask=mask)
    else:
        limit = code_limit(encode[:, None, None], MAX, NAN_VALUE)
        code = element_codes(t, r, limit, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_CODE, STOCHASTIC, HARDWARE)
        if OUTPUT == "packed":
            word = tl.sum(code << (4 * j)[None, None, :].to(tl.uint32), 2)
            tl.store(
                out_ptr + out_row + group[:, None] * (N // 8) + g[None, :],
                word.to(tl.int32, bitcast=True),
                mask=inside[:, None],
            )
        else:
            tl.store(out_ptr + out_row[:, :, None] + col, code.to(tl.uint8), mask=inside[:, None, None])
        tl.store(scale_ptr + row64 * groups + group, stored, mask=inside)
