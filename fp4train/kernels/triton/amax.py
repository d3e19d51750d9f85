"""Largest magnitude of x [R, C], or of each row, after a Hadamard transform along C where asked. NaN if x holds one.

Programs reduce tiles in registers and meet in an atomic maximum: of the bits as integers, which order magnitudes
like floats with NaN above infinity, so that the result depends on no order and stays on the device. The target must
hold zeros. Reads 2 bytes an element (BF16).
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_float, largest, largest_along
from fp4train.kernels.triton.hadamard import transform


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


@triton.jit
def amax_hadamard(
    x_ptr,
    out_ptr,
    rows,
    cols,
    x_stride,
    x_col_stride,
    tiles,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    PER_ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """out int32 [1] (or [rows]) = max of |x| after the transform of groups of SIZE columns. x in any strides;
    fastest with rows contiguous, as in a transposed view. tiles: programs across the rows; each takes ROWS rows and
    BLOCKS blocks of N columns."""
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    block = (tl.program_id(0) // tiles) * BLOCKS + tl.arange(0, BLOCKS)
    offset = (block.to(tl.int64) * N * x_col_stride)[:, None] + (row.to(tl.int64) * x_stride)[None, :]
    x = ()
    for i in tl.static_range(N):
        mask = (block * N + i < cols)[:, None] & (row < rows)[None, :]
        x = x + (as_float(tl.load(x_ptr + offset + tl.cast(x_col_stride, tl.int64) * i, mask=mask, other=0.0)),)
    x = transform(x, N, SIZE, NEGATIVE, FACTOR, HARDWARE)
    acc = tl.abs(x[0])
    for i in tl.static_range(1, N):
        acc = largest(acc, tl.abs(x[i]))
    m = tl.max(acc.to(tl.int32, bitcast=True), 0)
    if PER_ROW:
        tl.atomic_max(out_ptr + row, m, mask=row < rows)
    else:
        tl.atomic_max(out_ptr, tl.max(m, 0))
