"""Both forms of x [M, K] from one read of memory: codes or values of x along K, and of x.T along M
(columns.py), as the GEMMs of a layer take activations and gradients.

amax_both          their two amaxes, of which the second is that after the transform
quantize_both      their codes and scales, or their values
amax_produced      the same of an x that is computed from its sources (sources.py), and is not in memory,
quantize_produced  or of the two gradients of silu(gate) * up, from one read of the three tensors that both depend on
quantize_turned    the codes of one float32 scale (FP8 current, delayed), and their transpose
turned_produced    the same of an x of a source, after `amax_produced`

A tile has 4096 or 8192 elements, and the function of each form runs on it: the second finds the
tile in the cache that the first has filled. Bytes per element, BF16 in: 2 for the amaxes, 2 + 2
(0.5 + 1/16) for NVFP4's codes, 2 + 2 (1 + 1/32) for MXFP8's; a kernel per form reads x twice as
often: 5.1 instead of 9.1, and 4.1 instead of 6.1. Emulation takes values: of dy 2 + 2 + 2 + 2 = 8
bytes for NVFP4 and 6 for MXFP8, instead of 12 and 8; of x, whose second form is kept as codes, 2 +
2 + 2 + 1/2 + 1/16 = 6.6 and 2 + 2 + 1 + 1/32 = 5, instead of 10.6 and 7. Arguments and results are
those of the kernels of one form, quantize.py.

Of a source NVFP4 and FP8 read each tensor twice (amaxes, codes), MXFP8 once; the least that is
possible, since no code is known before the amax. Bytes per element of x, and those of a kernel that
writes x and that of both forms after it:

    source               NVFP4           MXFP8           FP8, current
    norm                 5.1 (9.1)       4.1 (8.1)       6 (10)
    silu(gate) * up      9.1 (11.1)      6.1 (10.1)      10 (12)
    both its gradients   14.3 (20.3)     10.1 (18.1)     16 (22)         for one element of each

A norm needs the sum of the squares of a whole row first. So a program of its first kernel takes all
tiles of a strip of tokens, sums over them, and finds them in the cache then (`EPS` > 0; 128 KB of
the L2 cache for 16 tokens of 4096 features). It stores 1 / sqrt(mean + EPS) of each token, for the
second kernel and for backward.

Where h is the sum of two tensors, as the residual stream and its change, the first kernel adds
them, rounds to BF16 as torch's add does, and writes h, which later kernels and the stream read: 9.1
bytes per element of NVFP4, 8.1 of MXFP8, 10 of FP8, the least that is possible (both terms read, h
and the codes written, h read again where an amax comes first); an add of its own, 11.1, 10.1 and
12.

`quantize_turned` reads a tile once and stores its codes twice, the second time turned over in
shared memory: 2 + 1 + 1 bytes per element, and 2 before for the amax that FP8 with current scaling
needs. The amax that delayed scaling needs is known; that of x is measured on the way.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding
from fp4train.kernels.triton.columns import largest_of, load_tokens, quantize_columns, transform
from fp4train.kernels.triton.quantize import (
    codes_of,
    load_eights,
    quantize_rows,
    quantize_rows16,
    scaled_or_nan,
)
from fp4train.kernels.triton.scale import float_scales
from fp4train.kernels.triton.sources import which_gradient


@triton.jit
def tile_amaxes(
    x_ptr,
    place,
    out_ptr,
    rows,
    cols,
    tiles,
    x_stride,
    x_col_stride,
    V: tl.constexpr,
    S: tl.constexpr,
):
    """Both amaxes of tile `place`, of a source S, are those of `amax_both` then."""
    x, _, _ = load_tokens(x_ptr, place, rows, cols, tiles, x_stride, x_col_stride, V, S)
    tl.atomic_max(out_ptr, tl.max(tl.max(largest_of(x, V).to(tl.int32, bitcast=True), 0), 0))
    if V.size > 0:
        x = transform(x, (0, 0), V)
    tl.atomic_max(out_ptr + 1, tl.max(tl.max(largest_of(x, V).to(tl.int32, bitcast=True), 0), 0))


@triton.jit
def tile_codes(
    pointers,
    place,
    rows,
    cols,
    tiles,
    x_stride,
    words,
    R: tl.constexpr,
    C: tl.constexpr,
    OWN,
    S: tl.constexpr,
):
    """Codes, or values, of both forms of tile `place`, of a source S.

    pointers: x, amaxes, codes or values, and scales of the rows and of the columns. words: key0,
        key1, counter3, and
    counter2, group of columns and row of both forms. OWN: the place of the amax of the columns, 0
    or 1.
    """
    x_ptr, amax_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr = pointers
    groups = tl.cdiv(cols, R.n)
    column_groups = tl.cdiv(rows, C.n)
    column_words = (words[0], words[1], words[3], words[2], words[4], words[5])
    outs = (x_ptr, amax_ptr, row_ptr, row_scale_ptr, amax_ptr + 2)
    if R.blocks == "rows16":
        quantize_rows16(
            outs, place, rows, cols, groups, tiles, x_stride, groups, column_words, R, S
        )
    else:
        row_stride = cols
        if R.output != "values":
            PER_WORD: tl.constexpr = 8 if R.output == "packed" else 1
            row_stride = groups * (R.n // PER_WORD)
        quantize_rows(
            outs, place, rows, cols, groups, tiles, x_stride, row_stride, column_words, R, S
        )
    column_words = (words[0], words[1], words[6], words[2], words[7], words[8])
    outs = (x_ptr, amax_ptr + OWN, column_ptr, column_scale_ptr, amax_ptr + 3)
    if C.output == "values":
        quantize_columns(
            outs, place, cols, rows, column_groups, tiles, 1, x_stride, 1, cols, column_words, C, S
        )
    else:
        PER_COLUMN_WORD: tl.constexpr = 16 if C.output == "packed" else 8
        stride = column_groups * (C.n // PER_COLUMN_WORD)
        quantize_columns(
            outs,
            place,
            cols,
            rows,
            column_groups,
            tiles,
            1,
            x_stride,
            stride,
            1,
            column_words,
            C,
            S,
        )


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_both(x_ptr, out_ptr, rows, cols, tiles, x_stride, x_col_stride, V: tl.constexpr):
    """out int32 [2]: the bits of max |x|, and of max |x.T| after the transform; the target must
    hold zeros.

    The arguments see x.T, as those of `amax_columns`: rows are features, and V is the variant of
    the column-wise form.
    """
    tile_amaxes(
        x_ptr, tl.program_id(0), out_ptr, rows, cols, tiles, x_stride, x_col_stride, V, "none"
    )


# A tuple of words would be specialised in spite of do_not_specialize: each seed and step would
# compile a kernel.
@triton.jit(
    do_not_specialize=[
        "key0",
        "key1",
        "counter3",
        "row_counter2",
        "row_col_group",
        "row_offset",
        "column_counter2",
        "column_col_group",
        "column_row_offset",
    ],
    do_not_specialize_on_alignment=["amax_ptr"],
)
def quantize_both(
    x_ptr,
    amax_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    rows,
    cols,
    x_stride,
    key0,
    key1,
    counter3,
    row_counter2,
    row_col_group,
    row_offset,
    column_counter2,
    column_col_group,
    column_row_offset,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Codes and scales of x [rows, cols], whose column stride is 1, by R, and of x.T by C; or
    values, those of x.T as x lies, its rows filled up to whole groups of the transform, and no
    scales.

    amax_ptr: [4], that of x and, with a transform, that of the column-wise form; behind them S_dec
        of each form is
    stored. R's tile is that of C, turned.
    """
    words = (key0, key1, counter3, row_counter2, row_col_group, row_offset)
    words = words + (column_counter2, column_col_group, column_row_offset)
    pointers = (x_ptr, amax_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr)
    OWN: tl.constexpr = 1 if C.size > 0 else 0
    tile_codes(
        pointers,
        tl.program_id(0),
        rows,
        cols,
        tl.cdiv(cols, C.tile_rows),
        x_stride,
        words,
        R,
        C,
        OWN,
        "none",
    )


@triton.jit
def first_of_strip(
    x_ptr, rows, cols, x_stride, EPS: tl.constexpr, V: tl.constexpr, S: tl.constexpr
):
    """The first tile of the program's strip of tokens, after 1 / sqrt(mean(h^2) + EPS) of its
    tokens was stored, or of S="root" 1 / (sqrt(mean(h^2)) + EPS).

    x_ptr: (h, weight, rstd), or (h, weight, rstd, and two tensors that lie as h does), of which h,
        their sum, is
    stored, too. rows: tokens.
    """
    GIVEN: tl.constexpr = len(x_ptr)
    TOKENS: tl.constexpr = V.n * V.tile_blocks
    FEATURES: tl.constexpr = V.tile_rows
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for start in range(0, cols, FEATURES):
        col = start + tl.arange(0, FEATURES)
        mask = (token < rows)[:, None] & (col < cols)[None, :]
        offset = (token.to(tl.int64) * x_stride)[:, None] + col[None, :]
        if GIVEN > 3:
            h = rounding.as_float(tl.load(x_ptr[3] + offset, mask=mask, other=0.0))
            h = rounding.as_bf16(
                h + rounding.as_float(tl.load(x_ptr[4] + offset, mask=mask, other=0.0)), V.hardware
            )
            tl.store(x_ptr[0] + offset, h, mask=mask)
        else:
            h = tl.load(x_ptr[0] + offset, mask=mask, other=0.0)
        h = rounding.as_float(h)
        total += h * h
    total = tl.sum(total, 1)
    mean = tl.div_rn(total, tl.full((TOKENS,), 1.0, tl.float32) * cols)
    root = tl.sqrt_rn(mean) + EPS if S == "root" else tl.sqrt_rn(mean + EPS)
    rstd = tl.div_rn(tl.full((TOKENS,), 1.0, tl.float32), root)
    tl.store(x_ptr[2] + token, rstd, mask=token < rows)
    tl.debug_barrier()  # the program's other threads read what this one stored
    return tl.program_id(0) * tl.cdiv(cols, V.tile_rows)


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_produced(
    x_ptr, out_ptr, rows, cols, x_stride, EPS: tl.constexpr, V: tl.constexpr, S: tl.constexpr
):
    """`amax_both` of x [rows, cols] of a source; out int32 [4], or of both gradients of "gradients"
    [8].

    EPS: of a norm; a program takes the strip of tokens of its tiles.
    """
    tiles = tl.cdiv(cols, V.tile_rows)
    if EPS > 0.0:
        strip_first = first_of_strip(x_ptr, rows, cols, x_stride, EPS, V, S)
        for tile in range(tiles):
            tile_amaxes(x_ptr, strip_first + tile, out_ptr, cols, rows, tiles, 1, x_stride, V, S)
    elif S == "gradients":
        out_ptr += 4 * which_gradient()
        tile_amaxes(x_ptr, tl.program_id(0) // 2, out_ptr, cols, rows, tiles, 1, x_stride, V, S)
    else:
        tile_amaxes(x_ptr, tl.program_id(0), out_ptr, cols, rows, tiles, 1, x_stride, V, S)


@triton.jit(
    do_not_specialize=[
        "key0",
        "key1",
        "counter3",
        "second_counter3",
        "row_counter2",
        "row_col_group",
        "row_offset",
        "column_counter2",
        "column_col_group",
        "column_row_offset",
    ],
    do_not_specialize_on_alignment=["amax_ptr"],
)
def quantize_produced(
    x_ptr,
    amax_ptr,
    out_ptr,
    rows,
    cols,
    x_stride,
    key0,
    key1,
    counter3,
    second_counter3,
    row_counter2,
    row_col_group,
    row_offset,
    column_counter2,
    column_col_group,
    column_row_offset,
    EPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """`quantize_both` of x of a source, or of both gradients of "gradients", the second with
    `second_counter3`.

    x_ptr: the tuple that S names. amax_ptr: [4] or [8], as `quantize_both` has it for each.
        out_ptr: codes and scales
    of the rows and of the columns, of each. EPS: of a norm whose rstd is not there yet, else 0.
    """
    tiles = tl.cdiv(cols, C.tile_rows)
    words = (key0, key1, counter3, row_counter2, row_col_group, row_offset)
    words = words + (column_counter2, column_col_group, column_row_offset)
    pointers = (x_ptr, amax_ptr, out_ptr[0], out_ptr[1], out_ptr[2], out_ptr[3])
    if EPS > 0.0:
        strip_first = first_of_strip(x_ptr, rows, cols, x_stride, EPS, C, S)
        for tile in range(tiles):
            tile_codes(pointers, strip_first + tile, rows, cols, tiles, x_stride, words, R, C, 1, S)
    elif S == "gradients":
        of_up = which_gradient()
        row_out, two, three, four = out_ptr[0], out_ptr[1], out_ptr[2], out_ptr[3]
        if of_up == 1:
            row_out, two, three, four = out_ptr[4], out_ptr[5], out_ptr[6], out_ptr[7]
        words = (
            key0,
            key1,
            tl.where(of_up == 0, counter3, second_counter3),
            row_counter2,
            row_col_group,
            row_offset,
        )
        words = words + (column_counter2, column_col_group, column_row_offset)
        pointers = (x_ptr, amax_ptr + 4 * of_up, row_out, two, three, four)
        tile_codes(pointers, tl.program_id(0) // 2, rows, cols, tiles, x_stride, words, R, C, 1, S)
    else:
        tile_codes(pointers, tl.program_id(0), rows, cols, tiles, x_stride, words, R, C, 1, S)


@triton.jit(do_not_specialize_on_alignment=["amax_ptr", "scale_ptr", "newest_ptr"])
def quantize_turned(
    x_ptr,
    amax_ptr,
    row_ptr,
    column_ptr,
    scale_ptr,
    newest_ptr,
    rows,
    cols,
    x_stride,
    V: tl.constexpr,
):
    """Codes of x [rows, cols], whose column stride is 1, by one float32 scale, and their transpose,
    rounded to nearest.

    amax_ptr: float32 [1]. row_ptr: uint8 [rows, cols]; column_ptr: uint8 [cols, rows]. scale_ptr:
        scale_inv, [1].
    newest_ptr: int32 [1], the bits of an amax; where V.enters it becomes the larger of itself and
        max |x|.
    """
    outs = (row_ptr, column_ptr, scale_ptr)
    turned_tile(
        x_ptr, amax_ptr, outs, newest_ptr, tl.program_id(0), rows, cols, x_stride, V, "none"
    )


@triton.jit(do_not_specialize_on_alignment=["amax_ptr"])
def turned_produced(
    x_ptr, amax_ptr, out_ptr, rows, cols, x_stride, V: tl.constexpr, S: tl.constexpr
):
    """`quantize_turned` of x of a source, or of both gradients of "gradients".

    x_ptr: the tuple that S names. amax_ptr: [4] or [8], as `amax_produced` leaves them. out_ptr:
        codes, their transpose
    and scale_inv, of each.
    """
    if S == "gradients":
        of_up = which_gradient()
        row_out, two, three = out_ptr[0], out_ptr[1], out_ptr[2]
        if of_up == 1:
            row_out, two, three = out_ptr[3], out_ptr[4], out_ptr[5]
        outs = (row_out, two, three)
        amax_ptr += 4 * of_up
        turned_tile(
            x_ptr, amax_ptr, outs, amax_ptr, tl.program_id(0) // 2, rows, cols, x_stride, V, S
        )
    else:
        turned_tile(
            x_ptr, amax_ptr, out_ptr, amax_ptr, tl.program_id(0), rows, cols, x_stride, V, S
        )


@triton.jit
def turned_tile(
    x_ptr, amax_ptr, outs, newest_ptr, place, rows, cols, x_stride, V: tl.constexpr, S: tl.constexpr
):
    """Codes of tile `place` of x, of a source S, and their transpose; `outs` are those of
    `quantize_turned`.
    """
    row_ptr, column_ptr, scale_ptr = outs
    tiles = tl.cdiv(cols, 8 * V.tile_blocks)
    row = place // tiles * V.tile_rows + tl.arange(0, V.tile_rows)
    eight = place % tiles * V.tile_blocks + tl.arange(0, V.tile_blocks)
    x = load_eights(x_ptr, row, eight[None, :], rows, cols, x_stride, V, S)
    scale, inverse = float_scales(tl.load(amax_ptr), V)
    tl.store(scale_ptr, inverse, mask=place == 0)
    if V.enters:
        largest = rounding.largest_of_eight(x).to(tl.int32, bitcast=True)
        tl.atomic_max(newest_ptr, tl.max(tl.max(largest, 1), 0))
    code = codes_of(scaled_or_nan(x, scale, V), 0.0, scale, V).to(tl.uint8)
    code = tl.reshape(code, (V.tile_rows, 8 * V.tile_blocks))
    col = place % tiles * (8 * V.tile_blocks) + tl.arange(0, 8 * V.tile_blocks)
    row64 = row.to(tl.int64)
    tl.store(
        row_ptr + (row64 * cols)[:, None] + col[None, :],
        code,
        mask=(row < rows)[:, None] & (col < cols)[None, :],
    )
    offset = (col.to(tl.int64) * rows)[:, None] + row[None, :]
    tl.store(
        column_ptr + offset, tl.trans(code), mask=(col < cols)[:, None] & (row < rows)[None, :]
    )
