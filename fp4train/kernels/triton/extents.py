"""Largest magnitudes of what shares a scale above block scales: HEIGHT x WIDTH, or whole rows.

amax_extents   those of x (a kernel of its own; after a Hadamard transform: `amax_columns`)
join           the largest magnitudes of a tile are joined to those in memory      (device function)

The target is int32 [ceil(rows / HEIGHT), ceil(cols / WIDTH)], the bits of magnitudes as in
quantize.py; it must hold zeros. A tile lies within one extent of columns. Where it lies within one
of rows, too, it ends in one atomic maximum, else in one for each of its rows.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding


@triton.jit
def join(
    out_ptr,
    bits,
    first_row,
    first_col,
    rows,
    cols,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Join the bits of magnitudes of ROWS rows, in columns from `first_col` of one extent."""
    across = 1
    extent_col = 0
    if WIDTH > 0:
        across = tl.cdiv(cols, WIDTH)
        extent_col = first_col // WIDTH
    if HEIGHT % ROWS == 0:
        place = out_ptr + first_row // HEIGHT * across + extent_col
        tl.atomic_max(place, tl.max(bits, 0), sem="relaxed")
    else:
        row = first_row + tl.arange(0, ROWS)
        place = out_ptr + row // HEIGHT * across + extent_col
        tl.atomic_max(place, bits, mask=row < rows, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def amax_extents(
    x_ptr,
    out_ptr,
    rows,
    cols,
    x_stride,
    x_col_stride,
    tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out int32: max |x| of each extent. tiles: programs across a row."""
    first_row = tl.program_id(0) // tiles * ROWS
    row = first_row + tl.arange(0, ROWS)
    first_col = tl.program_id(0) % tiles * COLS
    col = first_col + tl.arange(0, COLS)
    x = tl.load(
        x_ptr + (row.to(tl.int64) * x_stride)[:, None] + (col.to(tl.int64) * x_col_stride)[None, :],
        mask=(row < rows)[:, None] & (col < cols)[None, :],
        other=0.0,
    )
    largest = tl.max(tl.abs(rounding.as_float(x)).to(tl.int32, bitcast=True), 1)
    join(out_ptr, largest, first_row, first_col, rows, cols, ROWS, HEIGHT, WIDTH)
