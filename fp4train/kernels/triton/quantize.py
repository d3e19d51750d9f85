"""The kernel that quantises, whatever the blocks: a variant is one of those of rows.py and columns.py."""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton.columns import quantize_columns
from fp4train.kernels.triton.rows import quantize_rows, quantize_rows16, quantize_squares, quantize_whole


# A tuple of words would be specialised in spite of do_not_specialize: each seed and step would compile a kernel.
@triton.jit(do_not_specialize=["key0", "key1", "counter2", "counter3", "col_group", "row_offset"])
def quantize(
    x_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    decode_ptr,
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

    amax_ptr: [1] or [rows], unless V.outer is "none". out_ptr: codes (uint8 [R, Cp]), packed (int32 [R, Cp/8], eight
    E2M1 codes each, the first in the lowest nibble) or values (BF16 or float32 [R, C]: element * block scale).
    scale_ptr: those of blocks, [blocks of rows, groups] (not for values), or scale_inv of the tensor or its rows.
    decode_ptr: S_dec, [1] or [rows]. groups: blocks of a row; tiles: programs across a row (across the rows for
    columns). Strides count elements of x and of out. The rest are the words of `random_words`, as int32 bit patterns.
    """
    pointers = (x_ptr, amax_ptr, out_ptr, scale_ptr, decode_ptr)
    words = (key0, key1, counter2, counter3, col_group, row_offset)
    if V.blocks == "columns":
        quantize_columns(
            pointers, rows, cols, groups, tiles, x_stride, x_col_stride, out_stride, out_col_stride, words, V
        )
    elif V.blocks == "rows":
        quantize_rows(pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V)
    elif V.blocks == "rows16":
        quantize_rows16(pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V)
    elif V.blocks == "squares":
        quantize_squares(pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V)
    else:
        quantize_whole(pointers, rows, cols, groups, tiles, x_stride, out_stride, words, V)
