"""Both forms of x [M, K] from one read of memory: codes or values of x along K, and of x.T along M
(columns.py), as the GEMMs of a layer take activations and gradients.

amax_both          their two amaxes, of which the second is that after the transform
quantize_both      their codes and scales, or their values
quantize_turned    the codes of one float32 scale (FP8 current, delayed), and their transpose

A tile has 4096 or 8192 elements, and the function of each form runs on it: the second finds the
tile in the cache that the first has filled. Bytes per element, BF16 in: 2 for the amaxes, 2 + 2
(0.5 + 1/16) for NVFP4's codes, 2 + 2 (1 + 1/32) for MXFP8's; a kernel per form reads x twice as
often: 5.1 instead of 9.1, and 4.1 instead of 6.1. Emulation takes values: of dy 2 + 2 + 2 + 2 = 8
bytes for NVFP4 and 6 for MXFP8, instead of 12 and 8; of x, whose second form is kept as codes, 2 +
2 + 2 + 1/2 + 1/16 = 6.6 and 2 + 2 + 1 + 1/32 = 5, instead of 10.6 and 7. Arguments and results are
those of the kernels of one form, quantize.py.

`quantize_turned` reads a tile once and stores its codes twice, the second time turned over in
shared memory: 2 + 1 + 1 bytes per element, and 2 before for the amax that FP8 with current scaling
needs. The amax that delayed scaling needs is known; that of x is measured on the way.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding
from fp4train.kernels.triton.columns import (
    largest_of,
    load_tokens,
    quantize_columns,
    transformed_amax,
)
from fp4train.kernels.triton.quantize import (
    codes_of,
    load_eights,
    quantize_rows,
    quantize_rows16,
    scaled_or_nan,
)
from fp4train.kernels.triton.scale import float_scales


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_both(x_ptr, out_ptr, rows, cols, tiles, x_stride, x_col_stride, V: tl.constexpr):
    """out int32 [2]: the bits of max |x|, and of max |x.T| after the transform; the target must
    hold zeros.

    The arguments see x.T, as those of `amax_columns`: rows are features, and V is the variant of
    the column-wise form.
    """
    x, _, _ = load_tokens(x_ptr, tl.program_id(0), rows, cols, tiles, x_stride, x_col_stride, V)
    largest = largest_of(x, V).to(tl.int32, bitcast=True)
    tl.atomic_max(out_ptr, tl.max(tl.max(largest, 0), 0), sem="relaxed")
    if V.transform.size > 0:
        largest = transformed_amax(x, x_ptr.dtype.element_ty != tl.bfloat16, V)
        largest = largest.to(tl.int32, bitcast=True)
    tl.atomic_max(out_ptr + 1, tl.max(tl.max(largest, 0), 0), sem="relaxed")


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
    do_not_specialize_on_alignment=["amax_ptr", "row_other_ptr", "column_other_ptr"],
)
def quantize_both(
    x_ptr,
    amax_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    row_other_ptr,
    column_other_ptr,
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

    amax_ptr: [8], that of x and, with a transform, that of the column-wise form; behind them S_dec
        of each form is stored, and two numbers behind each, which are the factors of a product:
        `outer_scales` has the first, and `other_ptr`.
    R's tile is that of C, turned.
    """
    place = tl.program_id(0)
    tiles = tl.cdiv(cols, C.tile_rows)
    groups = tl.cdiv(cols, R.n)
    column_groups = tl.cdiv(rows, C.n)
    words = (key0, key1, row_counter2, counter3, row_col_group, row_offset)
    decode_ptr = amax_ptr + 2
    if R.factor:
        decode_ptr = (decode_ptr, row_other_ptr)
    outs = (x_ptr, amax_ptr, row_ptr, row_scale_ptr, decode_ptr)
    if R.blocks == "rows16":
        quantize_rows16(outs, place, rows, cols, groups, tiles, x_stride, groups, words, R)
    else:
        row_stride = cols
        if R.output != "values":
            PER_WORD: tl.constexpr = 8 if R.output == "packed" else 1
            row_stride = groups * (R.n // PER_WORD)
        quantize_rows(outs, place, rows, cols, groups, tiles, x_stride, row_stride, words, R)
    words = (key0, key1, column_counter2, counter3, column_col_group, column_row_offset)
    OWN: tl.constexpr = 1 if C.transform.size > 0 else 0
    column_decode_ptr = amax_ptr + 5
    if C.factor:
        column_decode_ptr = (column_decode_ptr, column_other_ptr)
    outs = (x_ptr, amax_ptr + OWN, column_ptr, column_scale_ptr, column_decode_ptr)
    if C.output == "values":
        quantize_columns(
            outs, place, cols, rows, column_groups, tiles, 1, x_stride, 1, cols, words, C
        )
    else:
        PER_COLUMN_WORD: tl.constexpr = 16 if C.output == "packed" else 8
        stride = column_groups * (C.n // PER_COLUMN_WORD)
        quantize_columns(
            outs, place, cols, rows, column_groups, tiles, 1, x_stride, stride, 1, words, C
        )


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
    place = tl.program_id(0)
    tiles = tl.cdiv(cols, 8 * V.tile_blocks)
    row = place // tiles * V.tile_rows + tl.arange(0, V.tile_rows)
    eight = place % tiles * V.tile_blocks + tl.arange(0, V.tile_blocks)
    x = load_eights(x_ptr, row, eight[None, :], rows, cols, x_stride)
    scale, inverse = float_scales(tl.load(amax_ptr), V)
    tl.store(scale_ptr, inverse, mask=place == 0)
    if V.enters:
        largest = rounding.largest_of_eight(x).to(tl.int32, bitcast=True)
        tl.atomic_max(newest_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")
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
