"""Largest magnitude of x [R, C], or of each row; NaN if x holds one. After a Hadamard transform: columns.py.

Programs reduce tiles in registers and meet in an atomic maximum: of the bits as integers, which order magnitudes
like floats with NaN above infinity, so that the result depends on no order and stays on the device. The target must
hold zeros. Reads 2 bytes per element (BF16).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton.rounding import as_float, largest, largest_along


@triton.jit
def amax_tensor(x_ptr, out_ptr, rows, cols, x_stride, tiles, steps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out int32 [1] = max |x|. Column stride 1. tiles: programs across a row; each takes `steps` tiles of ROWS x
    COLS, one below the other."""
    tile_col = tl.program_id(0) % tiles
    first = (tl.program_id(0) // tiles).to(tl.int64) * steps * ROWS
    col = tile_col * COLS + tl.arange(0, COLS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        acc = largest(acc, tl.abs(as_float(x)))
    m = tl.max(tl.max(acc.to(tl.int32, bitcast=True), 1), 0)
    tl.atomic_max(out_ptr, m)


@triton.jit
def amax_rows(x_ptr, out_ptr, rows, cols, x_stride, x_col_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out int32 [rows] = max |x| of each row. A program reduces ROWS rows over all columns: no atomics."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(
            x_ptr + (row * x_stride)[:, None] + (col.to(tl.int64) * x_col_stride)[None, :], mask=mask, other=0.0
        )
        acc = largest(acc, tl.abs(as_float(x)))
    tl.store(out_ptr + row, largest_along(acc, 1).to(tl.int32, bitcast=True), mask=row < rows)
