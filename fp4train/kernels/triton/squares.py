"""NxN blocks (weights): one scale serves the tensor and its transpose. x [R, C], column stride 1.

A program takes N rows by BLOCKS blocks as a tensor [N, BLOCKS*N/8, 8]. OUTPUT and the words as in rows.py.
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
def quantize_squares(
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
    BLOCKS: tl.constexpr,
    OUTPUT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """scale_ptr: [ceil(rows/N), groups]. GLOBAL: none or tensor. tiles: programs across a row of blocks."""
    tile_row = tl.program_id(0) // tiles
    tile_col = tl.program_id(0) % tiles
    row = tile_row * N + tl.arange(0, N)
    eight = tile_col * (BLOCKS * N // 8) + tl.arange(0, BLOCKS * N // 8)
    group = tile_col * BLOCKS + tl.arange(0, BLOCKS)
    j = tl.arange(0, 8)
    col = (eight * 8)[None, :, None] + j[None, None, :]
    row64 = row.to(tl.int64)
    in_rows = (row < rows)[:, None, None]
    x_offset = (row64 * x_stride)[:, None, None] + col
    x = as_float(tl.load(x_ptr + x_offset, mask=in_rows & (col < cols), other=0.0))

    s_enc = 1.0
    s_dec = 1.0
    if GLOBAL == "tensor":
        s_enc, s_dec = global_scales(tl.load(amax_ptr), BOUND)
        tl.store(decode_ptr, s_dec, mask=tl.program_id(0) == 0)
    amax_b = largest_along(largest_of_eight(x), 0)
    amax_b = largest_along(tl.reshape(amax_b, (BLOCKS, N // 8)), 1)
    stored, encode, decode = block_scales(
        amax_b, s_enc, s_dec, SCALE, MANTISSA, MAX, MAX_EXPONENT, RANGE, INVERSE_RANGE, IF_INFINITE
    )
    encode = tl.reshape(tl.broadcast_to(encode[:, None], (BLOCKS, N // 8)), (BLOCKS * N // 8,))[None, :, None]
    t = x * encode
    if not SIGNED_ZERO:
        t = t + 0.0  # a negative zero is coded as zero, as in TE

    r = 0.0
    if STOCHASTIC:
        w0, w1, w2, w3 = random_words(
            eight[None, :], row[:, None], 0, key0, key1, counter2, counter3, col_group, row_offset
        )
        r = eight_fractions(w0, w1, w2, w3)

    out_row = (row64 * out_stride)[:, None]
    if OUTPUT == "values":
        decode = tl.reshape(tl.broadcast_to(decode[:, None], (BLOCKS, N // 8)), (BLOCKS * N // 8,))[None, :, None]
        v = element_values(t, r, MANTISSA, MIN_EXPONENT, CODE_BITS, MAX, SCALE == "fp32" or SCALE == "pow2", STOCHASTIC)
        v = v * decode
        if out_ptr.dtype.element_ty == tl.bfloat16:
            v = as_bf16(v, HARDWARE)
        tl.store(out_ptr + out_row[:, :, None] + col, v, mask=in_rows & (col < width))
    else:
        limit = code_limit(encode, MAX, NAN_VALUE)
        code = element_codes(t, r, limit, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_CODE, STOCHASTIC, HARDWARE)
        if OUTPUT == "packed":
            word = tl.sum(code << (4 * j)[None, None, :].to(tl.uint32), 2).to(tl.int32, bitcast=True)
            tl.store(
                out_ptr + out_row + eight[None, :],
                word,
                mask=(row < rows)[:, None] & (eight < groups * (N // 8))[None, :],
            )
        else:
            tl.store(out_ptr + out_row[:, :, None] + col, code.to(tl.uint8), mask=in_rows & (col < groups * N))
        tl.store(scale_ptr + tile_row.to(tl.int64) * groups + group, stored, mask=group < groups)
