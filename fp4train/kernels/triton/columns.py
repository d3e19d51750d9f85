"""Blocks along a strided axis: the column-wise form, x.T quantised row-wise, without a transposed
copy; with the Hadamard transform.

quantize_columns   1xN blocks; NxN where each chooses its grid (levels.py)
amax_columns       the largest magnitude after the transform (a kernel of its own)

x [R, C] is a view whose rows are contiguous (stride 1 along R: the features), and whose blocks run
along C (the tokens). A thread holds the N neighbours of a block as N registers, a tuple of
[tile_blocks, tile_rows] tensors: loads run along the features, the butterfly, the amax and the
packing need no exchange between threads, and one Philox call serves eight places of the tuple.
Codes and scales are stored transposed, row after row, as the operand of wgrad wants them (Triton
turns the packed words over in shared memory); values keep x's layout. Any strides are right; rows
contiguous is fast. Bytes per element are those of quantize.py, the least: x is read once by each
kernel, 2 + 2 + 0.5 + 1/16 for the amax and NVFP4's codes. The transform is computed in both: kept
in memory it would move 2 more.

Hadamard transform: y = (x * d) H / sqrt(n), as `quantize.transform.apply_hadamard`. x is rounded to
BF16 first; the butterfly runs in float32 in the order of strides 1, 2, 4, ... ((a, b) -> (a+b,
a-b)); the scaled result is rounded to BF16.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding
from fp4train.kernels.triton.extents import join
from fp4train.kernels.triton.levels import (
    integer_codes,
    integer_values,
    levels_of,
    over_rows,
    takes_integers,
)
from fp4train.kernels.triton.scale import block_scales, outer_amax, outer_scales, place_of_scale


@triton.jit
def load_tokens(x_ptr, place, rows, cols, tiles, x_stride, x_col_stride, V: tl.constexpr):
    """(the N neighbours of the blocks of tile `place`: a tuple of float32 [tile_blocks, tile_rows];
    row, block of the row). Tiles lie across the rows first. N neighbours are V.transform.parts blocks.
    """
    N: tl.constexpr = V.n * V.transform.parts
    row = (place % tiles) * V.tile_rows + tl.arange(0, V.tile_rows)
    group = (place // tiles) * V.tile_blocks + tl.arange(0, V.tile_blocks)
    offset = (group.to(tl.int64) * N * x_col_stride)[:, None] + (row.to(tl.int64) * x_stride)[
        None, :
    ]
    x = ()
    for i in tl.static_range(N):
        token = (group * N + i)[:, None]
        here = offset + tl.cast(x_col_stride, tl.int64) * i
        mask = (token < cols) & (row < rows)[None, :]
        x = x + (rounding.as_float(tl.load(x_ptr + here, mask=mask, other=0.0)),)
    return x, row, group


@triton.jit
def load_columns(x_ptr, place, rows, cols, tiles, x_stride, x_col_stride, words, V: tl.constexpr):
    """`load_tokens`, transformed if V.transform.size; words: those of random bits, for signs that are drawn."""
    x, row, group = load_tokens(x_ptr, place, rows, cols, tiles, x_stride, x_col_stride, V)
    if V.transform.size > 0:
        signs = (0, 0)
        if V.transform.draws_signs:
            signs = drawn_signs(words, V)
        x = transform(x, signs, x_ptr.dtype.element_ty != tl.bfloat16, V)
        N: tl.constexpr = V.n * V.transform.parts
        if V.transform.size < N:
            x = within_groups(x, group, cols, V)
    return x, row, group


@triton.jit
def within_groups(x, group, cols, V: tl.constexpr):
    """`x` with zeros behind the last group of the transform that has a column of x, where a block
    is padded: those of the transform have signs.
    """
    N: tl.constexpr = V.n * V.transform.parts
    width = (cols + V.transform.size - 1) // V.transform.size * V.transform.size
    y = ()
    for i in tl.static_range(N):
        y = y + (tl.where((group * N + i < width)[:, None], x[i], 0.0),)
    return y


@triton.jit
def drawn_signs(words, V: tl.constexpr):
    """Bits of the signs of V.transform.size <= 64 neighbours, 1 for -1, in two uint32: `transform.drawn`."""
    key0, key1, counter2, counter3, _, _ = words
    if counter2.dtype.is_ptr():
        counter2 = tl.load(counter2)
    SIZE: tl.constexpr = V.transform.size
    index = tl.arange(0, SIZE).to(tl.uint32)
    zero = index * 0
    no_element = zero + 0xFFFFFFFF
    step = (counter2.to(tl.uint32) & 0xFFFFFFF8) + zero
    layer = counter3.to(tl.uint32) + zero
    high, low, _, _ = rounding.philox4x32(
        no_element, no_element, step, layer, key0.to(tl.uint32), key1.to(tl.uint32)
    )
    word, _, _, _ = rounding.philox4x32(index, zero, zero, zero, low, high)
    bits = (word & 1) << (index & 31)
    return tl.sum(tl.where(index < 32, bits, 0), 0), tl.sum(tl.where(index < 32, 0, bits), 0)


@triton.jit
def transform(x, signs, ROUNDS: tl.constexpr, V: tl.constexpr):
    """Tuple of N float32 tensors -> tuple of N float32 tensors on the BF16 grid; groups of V.transform.size
    are transformed. signs: those of `drawn_signs`, where they are drawn. ROUNDS: whether x is not
    on the BF16 grid.
    """
    N: tl.constexpr = V.n * V.transform.parts
    y = butterfly(x, signs, ROUNDS, V)
    z = ()
    for i in tl.static_range(N):
        z = z + (rounding.as_float(rounding.as_bf16(y[i] * V.transform.factor, V.hardware)),)
    return z


@triton.jit
def transformed_amax(x, ROUNDS: tl.constexpr, V: tl.constexpr):
    """Largest magnitude of the N neighbours after the transform, whose signs are not drawn. Factor
    and rounding are monotonic: they are applied to the maximum.
    """
    y = butterfly(x, (0, 0), ROUNDS, V)
    largest = largest_of(y, V) * V.transform.factor
    return rounding.as_float(rounding.as_bf16(largest, V.hardware))


@triton.jit
def butterfly(x, signs, ROUNDS: tl.constexpr, V: tl.constexpr):
    """`transform` without the factor and the rounding of its results."""
    N: tl.constexpr = V.n * V.transform.parts
    y = ()
    for i in tl.static_range(N):
        v = x[i]
        if ROUNDS:
            v = rounding.as_float(rounding.as_bf16(v, V.hardware))
        if V.transform.draws_signs:
            sign = (signs[i % V.transform.size // 32] >> (i % V.transform.size % 32)) << 31
            v = (v.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        elif (V.transform.negative >> (i % V.transform.size)) & 1:
            # not -v, which is 0 - v with Triton 3.6: 0 of 0, where the reference has -0
            v = v * -1.0
        y = y + (v,)
    for level in tl.static_range(8):
        if (1 << level) < V.transform.size:
            z = ()
            for i in tl.static_range(N):
                if (i >> level) & 1:
                    z = z + (y[i ^ (1 << level)] - y[i],)
                else:
                    z = z + (y[i] + y[i ^ (1 << level)],)
            y = z
    return y


@triton.jit
def largest_of(x, V: tl.constexpr):
    """Largest magnitude of the N neighbours."""
    N: tl.constexpr = len(x)
    largest = tl.abs(x[0])
    for i in tl.static_range(1, N):
        largest = rounding.largest(largest, tl.abs(x[i]))
    return largest


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_columns(x_ptr, out_ptr, rows, cols, tiles, x_stride, x_col_stride, V: tl.constexpr):
    """out int32 [1], or one of each row or extent as V.outer.kind says: the bits of max |x| after the
    transform. See quantize.py and extents.py.
    """
    x, row, _ = load_tokens(x_ptr, tl.program_id(0), rows, cols, tiles, x_stride, x_col_stride, V)
    largest = transformed_amax(x, x_ptr.dtype.element_ty != tl.bfloat16, V)
    m = tl.max(largest.to(tl.int32, bitcast=True), 0)
    if V.outer.kind == "extent":
        first_col = tl.program_id(0) // tiles * (V.tile_blocks * V.n * V.transform.parts)
        first_row = tl.program_id(0) % tiles * V.tile_rows
        ROWS: tl.constexpr = V.tile_rows
        HEIGHT: tl.constexpr = V.outer.rows
        WIDTH: tl.constexpr = V.outer.cols
        join(out_ptr, m, first_row, first_col, rows, cols, ROWS, HEIGHT, WIDTH)
    elif V.outer.kind == "row":
        tl.atomic_max(out_ptr + row, m, mask=row < rows, sem="relaxed")
    else:
        tl.atomic_max(out_ptr, tl.max(m, 0), sem="relaxed")


@triton.jit
def quantize_columns(
    pointers,
    place,
    rows,
    cols,
    groups,
    tiles,
    x_stride,
    x_col_stride,
    out_stride,
    out_col_stride,
    words,
    V: tl.constexpr,
):
    """1xN blocks of tile `place`, the arguments as in quantize.py. Packed words are int64 (16
    codes) and codes int64 (8 codes, the first in the lowest byte); values fill whole groups of the
    transform.
    """
    N: tl.constexpr = V.n
    PARTS: tl.constexpr = V.transform.parts
    x, row, group = load_columns(
        pointers[0], place, rows, cols, tiles, x_stride, x_col_stride, words, V
    )
    for part in tl.static_range(PARTS):
        block = ()
        for i in tl.static_range(N):
            block = block + (x[part * N + i],)
        quantize_blocks(
            pointers,
            block,
            row,
            group * PARTS + part,
            place,
            rows,
            cols,
            groups,
            tiles,
            out_stride,
            out_col_stride,
            words,
            V,
        )


@triton.jit
def quantize_blocks(
    pointers,
    x,
    row,
    group,
    place,
    rows,
    cols,
    groups,
    tiles,
    out_stride,
    out_col_stride,
    words,
    V: tl.constexpr,
):
    """Blocks `group` of rows `row`, of which the neighbours are x, as `quantize_columns` stores
    them.
    """
    _, amax_ptr, out_ptr, scale_ptr, decode_ptr = pointers
    N: tl.constexpr = V.n
    BLOCKS: tl.constexpr = V.tile_blocks
    ROWS: tl.constexpr = V.tile_rows
    row64 = row.to(tl.int64)
    inside = (group < groups)[:, None] & (row < rows)[None, :]
    tile_col = place // tiles
    s_enc, s_dec = outer_scales(
        amax_ptr, decode_ptr, row[None, :], tile_col, group[:, None], groups, place, rows, V
    )
    amax_b = largest_of(x, V)
    if V.height > 1:
        amax_b = over_rows(amax_b, V)
    factors = ()
    inverses = ()
    if V.scale.kind == "levels":
        stored, factors, inverses = levels_of(x, V)
        encode = factors[0]
        decode = inverses[0]
    else:
        stored, encode, decode = block_scales(amax_b, s_enc, s_dec, V)
    marked = 0
    if V.integers.step > 0.0:
        amax = outer_amax(amax_ptr, row[None, :], group[:, None], groups, rows, V)
        marked = takes_integers(x, encode, decode, amax, V)
        stored = tl.where(marked, stored | 0x80, stored)
    if V.output != "values":
        if V.height > 1:
            places = (row64 // V.height)[None, :] * groups + group[:, None]
            first_rows = (row % V.height == 0)[None, :]
            tl.store(scale_ptr + places, stored, mask=inside & first_rows)
        else:
            tl.store(
                scale_ptr + place_of_scale(row64[None, :], group[:, None], groups, V),
                stored,
                mask=inside,
            )

    width = cols
    if V.transform.size > 0:
        width = tl.cdiv(cols, V.transform.size) * V.transform.size
    limit = rounding.code_limit(encode, V)
    anchor = amax_b.to(tl.uint32, bitcast=True) >> 31
    SHIFT: tl.constexpr = 4 if V.output == "packed" else 8
    PER_WORD: tl.constexpr = 64 // SHIFT
    out_row = (row64 * out_stride)[None, :]
    packed = ()
    word = tl.zeros((BLOCKS, ROWS), tl.uint64)
    random = (0, 0, 0, 0)
    for i in tl.static_range(N):
        if V.scale.kind == "levels":
            encode = factors[i // 4]
            decode = inverses[i // 4]
        t = x[i] * encode
        r = 0.0
        if V.element.random_bits > 0:
            if i % 8 == 0:
                random = rounding.random_words(
                    (group * (N // 8) + i // 8)[:, None], row[None, :], anchor, words
                )
            r = rounding.threshold((random[(i % 8) // 2] >> (16 * (i % 2))) & 0xFFFF, V)
        if V.output == "values":
            if V.integers.step > 0.0:
                v = integer_values(t, r, marked, V) * decode
            else:
                v = rounding.element_values(t, r, V) * decode
            col = group * N + i
            if out_ptr.dtype.element_ty == tl.bfloat16:
                v = rounding.as_bf16(v, V.hardware)
            out = out_ptr + out_row + (col.to(tl.int64) * out_col_stride)[:, None]
            tl.store(out, v, mask=(col < width)[:, None] & (row < rows)[None, :])
        else:
            if V.integers.step > 0.0:
                code = integer_codes(t, r, marked, limit, V)
            else:
                code = rounding.element_codes(t, r, limit, V)
            word = word | (code.to(tl.uint64) << (SHIFT * (i % PER_WORD)))
            if i % PER_WORD == PER_WORD - 1:
                packed = packed + (word.to(tl.int64, bitcast=True),)
                word = tl.zeros((BLOCKS, ROWS), tl.uint64)
    if V.output != "values":
        WORDS: tl.constexpr = N // PER_WORD
        start = out_ptr + out_row + (group * WORDS)[:, None]
        if WORDS == 4:  # 32 bytes of a block: brought side by side, to be stored as one piece
            four = tl.join(tl.join(packed[0], packed[2]), tl.join(packed[1], packed[3]))
            four = tl.reshape(four, (BLOCKS, ROWS, 4))
            tl.store(
                start[:, :, None] + tl.arange(0, 4)[None, None, :], four, mask=inside[:, :, None]
            )
        else:
            for k in tl.static_range(WORDS):
                tl.store(start + k, packed[k], mask=inside)
