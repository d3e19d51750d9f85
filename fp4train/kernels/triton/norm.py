"""The backward pass of RMSNorm, y = h * rstd * w with rstd = 1 / sqrt(mean(h^2) + eps) of each
token:

    dh = rstd (dy w - n mean(dy w n)),  dw = sum over tokens of dy n,  n = h rstd

and of the norm that adds eps to the root, rstd = 1 / (sqrt(mean(h^2)) + eps), where the root is 1 /
rstd - eps:

    dh = rstd (dy w - n mean(dy w n) / (1 - eps rstd)),   the second term 0 where h is zero

A program takes a strip of ROWS tokens, of which it reads dy and h twice, the second time from the
cache. Sums are float32; the sum of dw over a strip is stored, and added up by the caller: 6 + 8 /
ROWS bytes per element of BF16, 6.5 with 16 tokens, of 6 that must be (1.08): dy and h read, dh
written. Where h is read by others, too, as a residual stream is, the gradient from there is added,
dh and the sum each rounded to BF16, as autograd adds gradients: 8.5 of 8 bytes (1.06), and 12.5 if
the sum is a kernel of its own.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding


@triton.jit
def used_weight(w, OUTSIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """The weight as the norm takes it."""
    if OUTSIDE > 0.0:
        return w
    else:
        return rounding.as_float(rounding.as_bf16(w, HARDWARE))


@triton.jit
def norm_backward(
    dy_ptr,
    h_ptr,
    w_ptr,
    rstd_ptr,
    dh_ptr,
    dw_ptr,
    rows,
    cols,
    dy_stride,
    h_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OUTSIDE: tl.constexpr,
    ADDS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """dh BF16 [rows, cols], and the strips' dw float32 [strips, cols], of dy and h [rows, cols], w
    [cols] in BF16 or float32, and rstd float32 [rows]. Column strides are 1. OUTSIDE: eps outside
    of the root; 0: it is within, and w is rounded to BF16. ADDS: h_ptr is a tuple, of h and of the
    gradient that is added to dh, which lie alike.
    """
    if ADDS:
        added_ptr = h_ptr[1]
        h_ptr = h_ptr[0]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row64 = row.to(tl.int64)
    inside = row < rows
    rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)[:, None]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        col = (start + tl.arange(0, COLS))[None, :]
        mask = inside[:, None] & (col < cols)
        dy = rounding.as_float(
            tl.load(dy_ptr + (row64 * dy_stride)[:, None] + col, mask=mask, other=0.0)
        )
        h = rounding.as_float(
            tl.load(h_ptr + (row64 * h_stride)[:, None] + col, mask=mask, other=0.0)
        )
        w = rounding.as_float(tl.load(w_ptr + col, mask=col < cols, other=0.0))
        total += dy * used_weight(w, OUTSIDE, HARDWARE) * (h * rstd)
    total = tl.sum(total, 1)
    mean = tl.div_rn(total, tl.full((ROWS,), 1.0, tl.float32) * cols)[:, None]
    if OUTSIDE > 0.0:
        normal = 1.0 - OUTSIDE * rstd
        mean = tl.where(normal > 0.0, tl.div_rn(mean, tl.where(normal > 0.0, normal, 1.0)), 0.0)
    for start in range(0, cols, COLS):
        col = (start + tl.arange(0, COLS))[None, :]
        mask = inside[:, None] & (col < cols)
        dy = rounding.as_float(
            tl.load(dy_ptr + (row64 * dy_stride)[:, None] + col, mask=mask, other=0.0)
        )
        h = rounding.as_float(
            tl.load(h_ptr + (row64 * h_stride)[:, None] + col, mask=mask, other=0.0)
        )
        w = rounding.as_float(tl.load(w_ptr + col, mask=col < cols, other=0.0))
        n = h * rstd
        dh = rstd * (dy * used_weight(w, OUTSIDE, HARDWARE) - n * mean)
        dh = rounding.as_bf16(dh, HARDWARE)
        if ADDS:
            added = tl.load(added_ptr + (row64 * h_stride)[:, None] + col, mask=mask, other=0.0)
            dh = rounding.as_bf16(rounding.as_float(dh) + rounding.as_float(added), HARDWARE)
        tl.store(dh_ptr + row64[:, None] * cols + col, dh, mask=mask)
        dw = tl.sum(dy * n, 0)[None, :]
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * cols + col, dw, mask=col < cols)
