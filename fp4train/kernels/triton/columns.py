"""1xN blocks along a strided axis: the column-wise form, x.T quantised row-wise, without a transposed copy; with the
Hadamard transform.

x [R, C] is a view whose rows are contiguous (stride 1 along R: the features), and whose blocks run along C (the
tokens). A thread holds the N neighbours of a block as N registers, a tuple of [BLOCKS, ROWS] tensors: loads run
along the features, the butterfly, the amax and the packing need no exchange between threads, and one Philox call
serves eight places of the tuple. Codes and scales are stored transposed, row after row, as the operand of wgrad
wants them (Triton turns the packed words over in shared memory); values keep x's layout.

OUTPUT as in rows.py, but packed words are int64 (16 codes) and codes int64 (8 codes, the first in the lowest byte).
Any strides are right; rows contiguous is fast.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_bf16, as_float, largest
from fp4train.kernels.triton.element import code_limit, element_codes, element_values
from fp4train.kernels.triton.hadamard import transform
from fp4train.kernels.triton.philox import fraction, random_words
from fp4train.kernels.triton.scale import block_scales, global_scales

_WORDS = ["key0", "key1", "counter2", "counter3", "col_group", "row_offset"]


@triton.jit(do_not_specialize=_WORDS)
def quantize_columns(
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
    x_col_stride,
    out_stride,
    out_col_stride,
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
    SIZE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    FACTOR: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OUTPUT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x [rows, cols] in any strides. groups: blocks a row; tiles: programs across the rows. SIZE: of the Hadamard
    transform, 0 for none. scale_ptr: [rows, groups]. decode_ptr: S_dec, [1] or [rows]. The six words are int32 bit
    patterns."""
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    group = (tl.program_id(0) // tiles) * BLOCKS + tl.arange(0, BLOCKS)
    row64 = row.to(tl.int64)
    inside = (group < groups)[:, None] & (row < rows)[None, :]
    offset = (group.to(tl.int64) * N * x_col_stride)[:, None] + (row64 * x_stride)[None, :]
    x = ()
    for i in tl.static_range(N):
        mask = (group * N + i < cols)[:, None] & (row < rows)[None, :]
        x = x + (as_float(tl.load(x_ptr + offset + tl.cast(x_col_stride, tl.int64) * i, mask=mask, other=0.0)),)
    if SIZE > 0:
        x = transform(x, N, SIZE, NEGATIVE, FACTOR, HARDWARE)

    s_enc = 1.0
    s_dec = 1.0
    if GLOBAL == "tensor":
        s_enc, s_dec = global_scales(tl.load(amax_ptr), BOUND)
        tl.store(decode_ptr, s_dec, mask=tl.program_id(0) == 0)
    elif GLOBAL == "row":
        s_enc, s_dec = global_scales(tl.load(amax_ptr + row, mask=row < rows, other=0.0), BOUND)
        if tl.program_id(0) < tiles:
            tl.store(decode_ptr + row, s_dec, mask=row < rows)
        s_enc = s_enc[None, :]
        s_dec = s_dec[None, :]
    amax_b = tl.abs(x[0])
    for i in tl.static_range(1, N):
        amax_b = largest(amax_b, tl.abs(x[i]))
    stored, encode, decode = block_scales(
        amax_b, s_enc, s_dec, SCALE, MANTISSA, MAX, MAX_EXPONENT, RANGE, INVERSE_RANGE, IF_INFINITE
    )
    if OUTPUT != "values":
        tl.store(scale_ptr + (row64 * groups)[None, :] + group[:, None], stored, mask=inside)

    limit = code_limit(encode, MAX, NAN_VALUE)
    anchor = amax_b.to(tl.uint32, bitcast=True) >> 31
    KEEP_NAN: tl.constexpr = SCALE == "fp32" or SCALE == "pow2"
    SHIFT: tl.constexpr = 4 if OUTPUT == "packed" else 8
    PER_WORD: tl.constexpr = 64 // SHIFT
    out_row = (row64 * out_stride)[None, :]
    words = ()
    word = tl.zeros((BLOCKS, ROWS), tl.uint64)
    random = (0, 0, 0, 0)
    for i in tl.static_range(N):
        t = x[i] * encode
        if not SIGNED_ZERO:
            t = t + 0.0  # a negative zero is coded as zero, as in TE
        r = 0.0
        if STOCHASTIC:
            if i % 8 == 0:
                random = random_words(
                    (group * (N // 8) + i // 8)[:, None],
                    row[None, :],
                    anchor,
                    key0,
                    key1,
                    counter2,
                    counter3,
                    col_group,
                    row_offset,
                )
            r = fraction((random[(i % 8) // 2] >> (16 * (i % 2))) & 0xFFFF)
        if OUTPUT == "values":
            v = element_values(t, r, MANTISSA, MIN_EXPONENT, CODE_BITS, MAX, KEEP_NAN, STOCHASTIC) * decode
            col = group * N + i
            if out_ptr.dtype.element_ty == tl.bfloat16:
                v = as_bf16(v, HARDWARE)
            out = out_ptr + out_row + (col.to(tl.int64) * out_col_stride)[:, None]
            tl.store(out, v, mask=(col < width)[:, None] & (row < rows)[None, :])
        else:
            code = element_codes(t, r, limit, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_CODE, STOCHASTIC, HARDWARE)
            word = word | (code.to(tl.uint64) << (SHIFT * (i % PER_WORD)))
            if i % PER_WORD == PER_WORD - 1:
                words = words + (word.to(tl.int64, bitcast=True),)
                word = tl.zeros((BLOCKS, ROWS), tl.uint64)
    if OUTPUT != "values":
        WORDS: tl.constexpr = N // PER_WORD
        first = out_ptr + out_row + (group * WORDS)[:, None]
        if WORDS == 4:  # 32 bytes of a block: brought side by side, to be stored as one piece
            four = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
            four = tl.reshape(four, (BLOCKS, ROWS, 4))
            tl.store(first[:, :, None] + tl.arange(0, 4)[None, None, :], four, mask=inside[:, :, None])
        else:
            for k in tl.static_range(WORDS):
                tl.store(first + k, words[k], mask=inside)
