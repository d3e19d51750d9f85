"""Both forms of x [M, K] from one read of memory: codes of x along K, and of x.T along M (columns.py), as the GEMMs of
a layer take activations and gradients.

amax_both       their two amaxes, of which the second is that after the transform
quantize_both   their codes and scales
quantize_turned   the codes of one float32 scale (FP8 current, delayed), and their transpose

A program of `quantize_both` takes a tile of 4096 or 8192 elements and runs the function of each form on it: the second
finds the tile in the cache that the first has filled. Bytes per element, BF16 in: 2 for the amaxes, 2 + 2 (0.5 + 1/16)
for NVFP4's codes, 2 + 2 (1 + 1/32) for MXFP8's; a kernel per form reads x twice as often: 5.1 instead of 9.1, and 4.1
instead of 6.1. Arguments and results are those of the kernels of one form, quantize.py.

`quantize_turned` reads a tile once and stores its codes twice, the second time turned over in shared memory: 2 + 1 + 1
bytes per element, and 2 before for the amax that FP8 with current scaling needs. The amax that delayed scaling needs is
known; that of x is measured on the way.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding
from fp4train.kernels.triton.columns import largest_of, load_tokens, quantize_columns, transform
from fp4train.kernels.triton.quantize import codes_of, load_eights, quantize_rows, quantize_rows16, scaled_or_nan
from fp4train.kernels.triton.scale import float_scales


@triton.jit
def amax_both(x_ptr, out_ptr, rows, cols, tiles, x_stride, x_col_stride, V: tl.constexpr):
    """out int32 [2]: the bits of max |x|, and of max |x.T| after the transform; the target must hold zeros.

    The arguments see x.T, as those of `amax_columns`: rows are features, and V is the variant of the column-wise form.
    """
    x, _, _ = load_tokens(x_ptr, rows, cols, tiles, x_stride, x_col_stride, V)
    tl.atomic_max(out_ptr, tl.max(tl.max(largest_of(x, V).to(tl.int32, bitcast=True), 0), 0))
    y = transform(x, V)
    tl.atomic_max(out_ptr + 1, tl.max(tl.max(largest_of(y, V).to(tl.int32, bitcast=True), 0), 0))


# A tuple of words would be specialised in spite of do_not_specialize: each seed and step would compile a kernel.
@triton.jit(
    do_not_specialize=[
        *("key0", "key1", "counter3", "row_counter2", "row_col_group", "row_offset"),
        *("column_counter2", "column_col_group", "column_row_offset"),
    ]
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
    """Codes and scales of x [rows, cols], whose column stride is 1, by R, and of x.T by C.

    amax_ptr: [4], that of x and, with a transform, that of the column-wise form; behind them S_dec of each form is
    stored. R's tile is that of C, turned.
    """
    tiles = tl.cdiv(cols, C.tile_rows)
    groups = tl.cdiv(cols, R.n)
    column_groups = tl.cdiv(rows, C.n)
    words = (key0, key1, row_counter2, counter3, row_col_group, row_offset)
    pointers = (x_ptr, amax_ptr, row_ptr, row_scale_ptr, amax_ptr + 2)
    if R.blocks == "rows16":
        quantize_rows16(pointers, rows, cols, groups, tiles, x_stride, groups, words, R)
    else:
        PER_WORD: tl.constexpr = 8 if R.output == "packed" else 1
        quantize_rows(pointers, rows, cols, groups, tiles, x_stride, groups * (R.n // PER_WORD), words, R)
    OWN: tl.constexpr = 1 if C.size > 0 else 0
    words = (key0, key1, column_counter2, counter3, column_col_group, column_row_offset)
    pointers = (x_ptr, amax_ptr + OWN, column_ptr, column_scale_ptr, amax_ptr + 3)
    PER_COLUMN_WORD: tl.constexpr = 16 if C.output == "packed" else 8
    stride = column_groups * (C.n // PER_COLUMN_WORD)
    quantize_columns(pointers, cols, rows, column_groups, tiles, 1, x_stride, stride, 1, words, C)


@triton.jit
def quantize_turned(x_ptr, amax_ptr, row_ptr, column_ptr, scale_ptr, newest_ptr, rows, cols, x_stride, V: tl.constexpr):
    """Codes of x [rows, cols], whose column stride is 1, by one float32 scale, and their transpose, rounded to nearest.

    amax_ptr: float32 [1]. row_ptr: uint8 [rows, cols]; column_ptr: uint8 [cols, rows]. scale_ptr: scale_inv, [1].
    newest_ptr: int32 [1], the bits of an amax; where V.enters it becomes the larger of itself and max |x|.
    """
    tiles = tl.cdiv(cols, 8 * V.tile_blocks)
    row = tl.program_id(0) // tiles * V.tile_rows + tl.arange(0, V.tile_rows)
    eight = tl.program_id(0) % tiles * V.tile_blocks + tl.arange(0, V.tile_blocks)
    x = load_eights(x_ptr, row, eight[None, :], rows, cols, x_stride)
    scale, inverse = float_scales(tl.load(amax_ptr), V)
    tl.store(scale_ptr, inverse, mask=tl.program_id(0) == 0)
    if V.enters:
        largest = rounding.largest_of_eight(x).to(tl.int32, bitcast=True)
        tl.atomic_max(newest_ptr, tl.max(tl.max(largest, 1), 0))
    code = codes_of(scaled_or_nan(x, scale, V), 0.0, scale, V).to(tl.uint8)
    code = tl.reshape(code, (V.tile_rows, 8 * V.tile_blocks))
    col = tl.program_id(0) % tiles * (8 * V.tile_blocks) + tl.arange(0, 8 * V.tile_blocks)
    row64 = row.to(tl.int64)
    tl.store(row_ptr + (row64 * cols)[:, None] + col[None, :], code, mask=(row < rows)[:, None] & (col < cols)[None, :])
    place = (col.to(tl.int64) * rows)[:, None] + row[None, :]
    tl.store(column_ptr + place, tl.trans(code), mask=(col < cols)[:, None] & (row < rows)[None, :])
