"""The kernel that quantises, of which a variant is one function: for blocks along contiguous
columns of x [R, C] one of those here, else that of columns.py. Codes back to values; largest
magnitudes.

All but the last two see x as a tensor [A, G, 8]: eight neighbours lie in one thread, which loads 16
bytes of BF16, makes one Philox call for them, and packs their E2M1 codes into one 32-bit word.

quantize_rows      1xN blocks: tile_rows x tile_blocks of them as [blocks, N/8, 8]
quantize_rows16    NVFP4's packed codes, one block per thread
quantize_squares   NxN blocks: tile_blocks of them side by side as [N, tile_blocks * N/8, 8]
quantize_whole     one float32 scale per tensor or row: [tile_rows, tile_blocks, 8]
quantize           the kernel
decode_blocks      codes and scales of 1xN and NxN blocks back to values (a kernel of its own)
amax_tensor        largest magnitude of x, and
amax_rows          of each row; NaN if x holds one (kernels of their own; after a Hadamard transform: columns.py)

The arguments are those of the kernel. Bytes per element, BF16 in: 2 + 0.5 + 1/16 for NVFP4's codes,
2 + 1 + 1/32 for MXFP8's, 3 for FP8's, 4 for BF16 values; 2 for an amax. That is the least: each
kernel reads x once and writes its result once. NVFP4 (4.6) and FP8 per tensor (5) take both
kernels, since no code is known before the tensor's amax.

The programs of an amax reduce tiles in registers and meet in an atomic maximum: of the bits as
integers, which order magnitudes like floats with NaN above infinity, so that the result depends on
no order and stays on the device. Nothing else is read from other programs: the atomics are relaxed,
without a barrier of memory. The target must hold zeros.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding
from fp4train.kernels.triton.columns import quantize_columns
from fp4train.kernels.triton.scale import (
    block_scales,
    e8m0_decode,
    float_scales,
    outer_scales,
    place_of_scale,
)


@triton.jit
def blocks_of(place, tiles, V: tl.constexpr):
    """(row, block of the row) of each of the 1xN blocks of tile `place`."""
    i = tl.arange(0, V.tile_rows * V.tile_blocks)
    row = place // tiles * V.tile_rows + i // V.tile_blocks
    group = place % tiles * V.tile_blocks + i % V.tile_blocks
    return row, group


@triton.jit
def columns_of(eight):
    """Columns [A, G, 8] of groups of eight [A, G]."""
    return (eight * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]


@triton.jit
def load_eights(x_ptr, row, eight, rows, cols, x_stride):
    """float32 [A, G, 8] of rows [A] and groups of eight columns [A or 1, G]; 0 outside of x."""
    col = columns_of(eight)
    offset = (row.to(tl.int64) * x_stride)[:, None, None] + col
    mask = (row < rows)[:, None, None] & (col < cols)
    return rounding.as_float(tl.load(x_ptr + offset, mask=mask, other=0.0))


@triton.jit
def scaled_or_nan(x, encode, V: tl.constexpr):
    """x * encode, the value to round: NaN where x is not finite and its amax came from
    elsewhere.
    """
    t = x * encode
    if V.given:
        t = tl.where(tl.abs(x) < float("inf"), t, float("nan"))
    return t


@triton.jit
def codes_of(t, r, encode, V: tl.constexpr):
    """Codes (uint32) of t, x * encode."""
    limit = rounding.code_limit(encode, V)
    if V.given:
        limit = tl.where(t == t, limit, V.element.nan_value)
    return rounding.element_codes(t, r, limit, V)


@triton.jit
def store_rounded(
    out_ptr,
    x,
    encode,
    decode,
    row,
    eight,
    rows,
    cols,
    stored_cols,
    out_stride,
    words,
    V: tl.constexpr,
):
    """Round x * encode and store it: values times `decode` up to `cols`, codes up to
    `stored_cols`.
    """
    t = scaled_or_nan(x, encode, V)
    r = rounding.eight_fractions(eight, row[:, None], 0, words, V)
    out_row = (row.to(tl.int64) * out_stride)[:, None]
    inside = (row < rows)[:, None]
    col = columns_of(eight)
    if V.output == "values":
        v = rounding.element_values(t, r, V) * decode
        if out_ptr.dtype.element_ty == tl.bfloat16:
            v = rounding.as_bf16(v, V.hardware)
        tl.store(out_ptr + out_row[:, :, None] + col, v, mask=inside[:, :, None] & (col < cols))
    else:
        code = codes_of(t, r, encode, V)
        if V.output == "packed":
            word = tl.sum(code << (4 * tl.arange(0, 8))[None, None, :].to(tl.uint32), 2).to(
                tl.int32, bitcast=True
            )
            tl.store(out_ptr + out_row + eight, word, mask=inside & (eight < stored_cols // 8))
        else:
            mask = inside[:, :, None] & (col < stored_cols)
            tl.store(out_ptr + out_row[:, :, None] + col, code.to(tl.uint8), mask=mask)


@triton.jit
def quantize_rows(
    pointers,
    place,
    rows,
    cols,
    groups,
    tiles,
    x_stride,
    out_stride,
    words,
    V: tl.constexpr,
):
    """1xN blocks of tile `place`; column stride 1."""
    x_ptr, amax_ptr, out_ptr, scale_ptr, decode_ptr = pointers
    row, group = blocks_of(place, tiles, V)
    eight = group[:, None] * (V.n // 8) + tl.arange(0, V.n // 8)[None, :]
    x = load_eights(x_ptr, row, eight, rows, cols, x_stride)
    s_enc, s_dec = outer_scales(amax_ptr, decode_ptr, row, group, group, groups, place, rows, V)
    stored, encode, decode = block_scales(
        rounding.largest_along(rounding.largest_of_eight(x), 1), s_enc, s_dec, V
    )
    encode = encode[:, None, None]
    decode = decode[:, None, None]
    store_rounded(
        out_ptr, x, encode, decode, row, eight, rows, cols, groups * V.n, out_stride, words, V
    )
    if V.output != "values":
        place = place_of_scale(row.to(tl.int64), group, groups, V)
        tl.store(scale_ptr + place, stored, mask=(row < rows) & (group < groups))


@triton.jit
def quantize_rows16(
    pointers,
    place,
    rows,
    cols,
    groups,
    tiles,
    x_stride,
    out_stride,
    words,
    V: tl.constexpr,
):
    """1x16 E2M1 blocks, output "packed": int64 words of sixteen codes, [rows, groups].

    The result of `quantize_rows`. There two threads share a block and both compute its scale, which
    is a sixth of the instructions, and this kernel is bound by them on an H200 (12 integer
    instructions per element at half rate, for 2.56 bytes). Here a thread loads its block in two
    pieces of 16 bytes, computes one scale, and stores one word of 16 codes; neighbouring threads
    store neighbouring words.
    """
    x_ptr, amax_ptr, out_ptr, scale_ptr, decode_ptr = pointers
    row, group = blocks_of(place, tiles, V)
    eight = (group * 2)[:, None]
    x = (
        load_eights(x_ptr, row, eight, rows, cols, x_stride),
        load_eights(x_ptr, row, eight + 1, rows, cols, x_stride),
    )
    block = group[:, None]
    s_enc, s_dec = outer_scales(
        amax_ptr, decode_ptr, row[:, None], block, block, groups, place, rows, V
    )
    amax_b = rounding.largest(rounding.largest_of_eight(x[0]), rounding.largest_of_eight(x[1]))
    stored, encode, _ = block_scales(amax_b, s_enc, s_dec, V)
    limit = rounding.code_limit(encode, V)[:, :, None]
    anchor = amax_b.to(tl.uint32, bitcast=True) >> 31
    word = tl.zeros((V.tile_rows * V.tile_blocks, 1), tl.uint64)
    for half in tl.static_range(2):
        r = rounding.eight_fractions(eight + half, row[:, None], anchor, words, V)
        code = rounding.element_codes(x[half] * encode[:, :, None], r, limit, V)
        nibbles = code << (4 * tl.arange(0, 8))[None, None, :].to(tl.uint32)
        word = word | (tl.sum(nibbles, 2).to(tl.uint64) << (32 * half))
    mask = ((row < rows) & (group < groups))[:, None]
    row64 = row.to(tl.int64)
    tl.store(
        out_ptr + (row64 * out_stride + group)[:, None], word.to(tl.int64, bitcast=True), mask=mask
    )
    tl.store(scale_ptr + place_of_scale(row64, group, groups, V)[:, None], stored, mask=mask)


@triton.jit
def quantize_squares(
    pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V: tl.constexpr
):
    """NxN blocks (weights): one scale serves the tensor and its transpose. Column stride 1; no
    global scale of rows.
    """
    x_ptr, amax_ptr, out_ptr, scale_ptr, decode_ptr = pointers
    EIGHTS: tl.constexpr = V.n // 8
    tile_row = tl.program_id(0) // tiles
    tile_col = tl.program_id(0) % tiles
    row = tile_row * V.n + tl.arange(0, V.n)
    group = tile_col * V.tile_blocks + tl.arange(0, V.tile_blocks)
    eight = (tile_col * (V.tile_blocks * EIGHTS) + tl.arange(0, V.tile_blocks * EIGHTS))[None, :]
    x = load_eights(x_ptr, row, eight, rows, cols, x_stride)
    place = tl.program_id(0)
    first_row = tl.zeros_like(group) + tile_row * V.n
    s_enc, s_dec = outer_scales(amax_ptr, decode_ptr, first_row, 0, group, groups, place, rows, V)
    # the other order, reshaped between the reductions, compiles for minutes under Triton 3.6
    amax_e = tl.reshape(rounding.largest_of_eight(x), (V.n, V.tile_blocks, EIGHTS))
    amax_b = rounding.largest_along(rounding.largest_along(amax_e, 2), 0)
    stored, encode, decode = block_scales(amax_b, s_enc, s_dec, V)
    encode = tl.reshape(
        tl.broadcast_to(encode[:, None], (V.tile_blocks, EIGHTS)), (1, V.tile_blocks * EIGHTS, 1)
    )
    decode = tl.reshape(
        tl.broadcast_to(decode[:, None], (V.tile_blocks, EIGHTS)), (1, V.tile_blocks * EIGHTS, 1)
    )
    store_rounded(
        out_ptr, x, encode, decode, row, eight, rows, cols, groups * V.n, out_stride, words, V
    )
    if V.output != "values":
        tl.store(scale_ptr + tile_row.to(tl.int64) * groups + group, stored, mask=group < groups)


@triton.jit
def quantize_whole(
    pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V: tl.constexpr
):
    """One float32 scale per tensor or row (FP8 current, delayed, per row): codes, or values without
    the scale.

    The amax is given (from `amax_tensor`, or from history); scale and its inverse are computed in
    each program, the inverse stored once. Where the amax came from elsewhere x may exceed it: large
    values saturate, but an infinity becomes NaN. A program takes tile_rows rows of tile_blocks
    groups of eight columns. scale_ptr: scale_inv, [1] or [rows]; decode_ptr is not used.
    """
    x_ptr, amax_ptr, out_ptr, scale_ptr, _ = pointers
    tile_col = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles) * V.tile_rows + tl.arange(0, V.tile_rows)
    eight = (tile_col * V.tile_blocks + tl.arange(0, V.tile_blocks))[None, :]
    x = load_eights(x_ptr, row, eight, rows, cols, x_stride)
    if V.outer.kind == "row":
        scale, inverse = float_scales(tl.load(amax_ptr + row, mask=row < rows, other=0.0), V)
        if tile_col == 0:
            tl.store(scale_ptr + row, inverse, mask=row < rows)
        scale = scale[:, None, None]
    else:
        scale, inverse = float_scales(tl.load(amax_ptr), V)
        tl.store(scale_ptr, inverse, mask=tl.program_id(0) == 0)
    store_rounded(out_ptr, x, scale, 1.0, row, eight, rows, cols, cols, out_stride, words, V)


# A tuple of words would be specialised in spite of do_not_specialize: each seed and step would
# compile a kernel. An amax may be one number of a history: no kernel is compiled again for where it
# lies.
@triton.jit(
    do_not_specialize=["key0", "key1", "counter2", "counter3", "col_group", "row_offset"],
    do_not_specialize_on_alignment=["amax_ptr", "decode_ptr", "other_ptr"],
)
def quantize(
    x_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    decode_ptr,
    other_ptr,
    rows,
    cols,
    groups,
    tiles,
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
    V: tl.constexpr,
):
    """Quantise x [rows, cols].

    amax_ptr: one, one of each row, or of each V.outer.rows x V.outer.cols, unless V.outer.kind is
        "none". out_ptr: codes (uint8 [R, Cp]), packed (int32
        [R, Cp/8], eight
    E2M1 codes each, the first in the lowest nibble) or values (BF16 or float32 [R, C]: element *
    block scale). scale_ptr: those of blocks (not for values), [blocks of rows, groups] or V.tiled,
    or scale_inv of the tensor or its rows. decode_ptr: S_dec, [1] or [rows]; other_ptr: see
    `outer_scales`. groups: blocks of a row; tiles: programs across a row (across the rows for
    columns). Strides count elements of x and of out. The rest are the words of `random_words`, as
    int32 bit patterns.
    """
    if V.factor:
        decode_ptr = (decode_ptr, other_ptr)
    pointers = (x_ptr, amax_ptr, out_ptr, scale_ptr, decode_ptr)
    words = (key0, key1, counter2, counter3, col_group, row_offset)
    place = tl.program_id(0)
    if V.blocks == "columns":
        quantize_columns(
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
            V,
        )
    elif V.blocks == "rows":
        quantize_rows(pointers, place, rows, cols, groups, tiles, x_stride, out_stride, words, V)
    elif V.blocks == "rows16":
        quantize_rows16(pointers, place, rows, cols, groups, tiles, x_stride, out_stride, words, V)
    elif V.blocks == "squares":
        quantize_squares(pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V)
    else:
        quantize_whole(pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V)


@triton.jit
def decode_codes(
    code,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    NAN_ABOVE: tl.constexpr,
):
    """uint32 codes -> float32. NAN_ABOVE: magnitudes above this code are NaN (E4M3: 0x7e).

    By arithmetic: exponent and mantissa moved to a float32's place give value * 2^(bias-127),
    subnormals included, and one multiplication by 2^(127-bias), exact, does the rest; two where
    that is no float32 number.
    """
    magnitude = code & ((1 << CODE_BITS) - 1)
    FIRST: tl.constexpr = MIN_EXPONENT if MIN_EXPONENT < 1 else 1
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (126 + FIRST))
    if MIN_EXPONENT > 1:
        value = value * (2.0 ** (MIN_EXPONENT - 1))
    value = tl.where(magnitude > NAN_ABOVE, float("nan"), value)
    sign = (code << (31 - CODE_BITS)) & 0x80000000
    return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_blocks(
    code_ptr,
    scale_ptr,
    out_ptr,
    rows,
    groups,
    tiles,
    width,
    code_stride,
    out_stride,
    V: tl.constexpr,
):
    """Element * block scale, without the global scale; what `Quantized.decoded()` holds.

    Codes uint8 [rows, groups*N], or, for E2M1, int32 words [rows, groups*N/8]; scales [rows/height,
    groups]. out [rows, width], BF16 or float32. Bytes per element: 0.5 + 1/16 + 2 for NVFP4, 1 +
    1/32 + 2 for MXFP8.
    """
    row, group = blocks_of(tl.program_id(0), tiles, V)
    inside = (row < rows) & (group < groups)
    eight = group[:, None] * (V.n // 8) + tl.arange(0, V.n // 8)[None, :]
    col = columns_of(eight)
    row64 = row.to(tl.int64)
    code_row = (row64 * code_stride)[:, None]
    if V.element.code_bits <= 3:
        word = tl.load(code_ptr + code_row + eight, mask=inside[:, None], other=0)
        shift = (4 * tl.arange(0, 8))[None, None, :].to(tl.uint32)
        code = (word.to(tl.uint32, bitcast=True)[:, :, None] >> shift) & 0xF
    else:
        code = tl.load(
            code_ptr + code_row[:, :, None] + col, mask=inside[:, None, None], other=0
        ).to(tl.uint32)
    scale = tl.load(scale_ptr + row64 // V.height * groups + group, mask=inside, other=0)
    if V.scale.kind == "unsigned":
        scale = decode_codes(
            scale.to(tl.uint32),
            V.scale.mantissa,
            V.scale.min_exponent,
            V.scale.bits,
            V.scale.nan_above,
        )
    elif V.scale.kind == "e8m0":
        scale = e8m0_decode(scale.to(tl.int32))
    if rounding.casts(V):
        value = rounding.values_of_fp8(code.to(tl.uint8), V)
    else:
        value = decode_codes(
            code,
            V.element.mantissa,
            V.element.min_exponent,
            V.element.code_bits,
            V.element.nan_above,
        )
    value = value * scale[:, None, None]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        value = rounding.as_bf16(value, V.hardware)
    mask = (row < rows)[:, None, None] & (col < width)
    tl.store(out_ptr + (row64 * out_stride)[:, None, None] + col, value, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_tensor(
    x_ptr, out_ptr, rows, cols, x_stride, tiles, steps, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """out int32 [1] = max |x|. Column stride 1. tiles: programs across a row; each takes `steps`
    tiles of ROWS x COLS, one below the other.
    """
    tile_col = tl.program_id(0) % tiles
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * steps * ROWS
    col = tile_col * COLS + tl.arange(0, COLS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(steps):
        row = first_row + step * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        acc = rounding.largest(acc, tl.abs(rounding.as_float(x)))
    m = tl.max(tl.max(acc.to(tl.int32, bitcast=True), 1), 0)
    tl.atomic_max(out_ptr, m, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_tensors(parts_ptr, out_ptr, SIZE: tl.constexpr):
    """out int32: max |x| of each of several float32 tensors. parts_ptr: int64 [programs, 3], of the
    part of each program: its address, its count of numbers, and the place of its tensor.
    """
    part_ptr = parts_ptr + tl.program_id(0) * 3
    x_ptr = tl.load(part_ptr).to(tl.pointer_type(tl.float32), bitcast=True)
    count = tl.load(part_ptr + 1)
    acc = tl.zeros((SIZE,), tl.float32)
    for start in range(0, count, SIZE):
        place = start + tl.arange(0, SIZE)
        acc = rounding.largest(acc, tl.abs(tl.load(x_ptr + place, mask=place < count, other=0.0)))
    m = tl.max(acc.to(tl.int32, bitcast=True), 0)
    tl.atomic_max(out_ptr + tl.load(part_ptr + 2), m, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_rows(
    x_ptr, out_ptr, rows, cols, x_stride, x_col_stride, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """out int32 [rows] = max |x| of each row. A program reduces ROWS rows over all columns: no
    atomics.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(
            x_ptr + (row * x_stride)[:, None] + (col.to(tl.int64) * x_col_stride)[None, :],
            mask=mask,
            other=0.0,
        )
        acc = rounding.largest(acc, tl.abs(rounding.as_float(x)))
    tl.store(
        out_ptr + row, rounding.largest_along(acc, 1).to(tl.int32, bitcast=True), mask=row < rows
    )
