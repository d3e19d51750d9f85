"""One step of AdamW with moments in BF16, rounded stochastically: `optim.rounded.update` in one
kernel.

20 bytes per parameter are moved, of 20 that must be: w, m and v are read and written, g is read.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding


@triton.jit
def rounded(x, half, HARDWARE: tl.constexpr):
    """Finite float32 -> BF16: the upper half of (bits of x + 16 random bits), which the cast takes
    exactly.
    """
    upper = ((x.to(tl.uint32, bitcast=True) + half) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return rounding.as_bf16(upper, HARDWARE)


@triton.jit(
    do_not_specialize=["key", "first_layer", "second_layer", "col_group", "row_offset"],
    do_not_specialize_on_alignment=["numbers_ptr", "counter_ptr", "failed_ptr"],
)
def adamw(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    numbers_ptr,
    counter_ptr,
    failed_ptr,
    cols,
    groups,
    count,
    skip,
    key,
    first_layer,
    second_layer,
    col_group,
    row_offset,
    V: tl.constexpr,
):
    """Update a slab [rows, cols] in place.

    numbers_ptr: float32 [4], keep, size, correction, divisor; counter_ptr: int32 [1], the counter's
        word of the step;
    failed_ptr: float32 [1], not 0 where nothing is to change. groups: eights of random bits per
        row, of which the first
    `skip` are not the row's; count: those of all rows. key: both words of the key, 0. The rest are
    words of the counters, as int32 bit patterns. Where `skip` is 0, for which a kernel is compiled,
    and `cols` a multiple of 16, a thread has an eight: it reads 16 bytes at a time, and draws
    random words once for all of it.
    """
    at = tl.program_id(0).to(tl.int64) * V.tile + tl.arange(0, V.tile).to(tl.int64)
    row, group = at // groups, at % groups
    col = group[:, None] * 8 + tl.arange(0, 8)[None, :] - skip
    place = row[:, None] * cols + col
    count = tl.where(tl.load(failed_ptr) == 0.0, count, 0)
    mask = (at < count)[:, None] & (col >= 0) & (col < cols)
    keep, size = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    correction, divisor = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    w = tl.load(weight_ptr + place, mask=mask, other=0.0)
    g = tl.load(gradient_ptr + place, mask=mask, other=0.0)
    m = rounding.as_float(tl.load(first_ptr + place, mask=mask, other=0.0))
    v = rounding.as_float(tl.load(second_ptr + place, mask=mask, other=0.0))
    g = tl.div_rn(g, tl.zeros_like(g) + divisor)
    m = m * V.beta1 + g * V.rest1
    v = v * V.beta2 + (g * g) * V.rest2
    root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + correction)
    tl.store(weight_ptr + place, w * keep - size * tl.div_rn(m, root + V.eps), mask=mask)
    half = rounding.eight_halves(
        group, row, 0, (key, key, counter_ptr, first_layer, col_group, row_offset)
    )
    tl.store(first_ptr + place, rounded(m, half, V.hardware), mask=mask)
    half = rounding.eight_halves(
        group, row, 0, (key, key, counter_ptr, second_layer, col_group, row_offset)
    )
    tl.store(second_ptr + place, rounded(v, half, V.hardware), mask=mask)
