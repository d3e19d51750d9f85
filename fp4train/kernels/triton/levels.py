"""Blocks with more than a scale: HiF4's two levels of exponents of one bit, and IF4's two grids, of
which each block takes one. A thread holds the N neighbours of a block, or of a row of it, as in
columns.py.

levels_of          HiF4's four bytes of a block, and the factors of each four elements
integer_codes      codes of the elements of blocks that may hold integers
integer_values     their values
takes_integers     whether a block's error is smaller on the grid of integers

The float32 operations are those of `formats.levels` and `quantize.scaling.choose_grids` in their
order: errors are summed along a row, then over the rows of a block as a tree.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding

SEVENTH: tl.constexpr = tl.constexpr(0.142578125)
"""1/7 in BF16."""
E6M2_SMALLEST: tl.constexpr = tl.constexpr(2.0**-48)
E6M2_LARGEST: tl.constexpr = tl.constexpr(1.5 * 2.0**15)
E6M2_START: tl.constexpr = tl.constexpr((127 - 48) << 2)


@triton.jit
def as_bf16_grid(x, V: tl.constexpr):
    """float32 -> float32, rounded to BF16."""
    return rounding.as_float(rounding.as_bf16(x, V.hardware))


@triton.jit
def e6m2_codes(x):
    """E6M2 codes (int32) of the nearest values, ties to even; 255 where x >= 0 is not finite."""
    clamped = tl.where(x < E6M2_SMALLEST, E6M2_SMALLEST, x)
    bits = tl.where(clamped < E6M2_LARGEST, clamped, E6M2_LARGEST).to(tl.int32, bitcast=True)
    code = ((bits + (0xFFFFF + ((bits >> 21) & 1))) >> 21) - E6M2_START
    return tl.where(x < float("inf"), code, 255)


@triton.jit
def levels_of(x, V: tl.constexpr):
    """(int32 words of the four bytes of blocks of 64, encode factors of each four elements, decode
    factors): the scale, the first exponents of each eight, the second ones of each four.
    """
    fours = ()
    for i in tl.static_range(16):
        a = rounding.largest(tl.abs(x[4 * i]), tl.abs(x[4 * i + 1]))
        b = rounding.largest(tl.abs(x[4 * i + 2]), tl.abs(x[4 * i + 3]))
        fours = fours + (rounding.largest(a, b),)
    eights = ()
    for i in tl.static_range(8):
        eights = eights + (rounding.largest(fours[2 * i], fours[2 * i + 1]),)
    amax = eights[0]
    for i in tl.static_range(1, 8):
        amax = rounding.largest(amax, eights[i])
    word = e6m2_codes(as_bf16_grid(amax * SEVENTH, V))
    scale = ((word + E6M2_START) << 21).to(tl.float32, bitcast=True)
    scale = tl.where(word == 255, float("nan"), scale)
    inverse = as_bf16_grid(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), V)
    encodes = ()
    decodes = ()
    for i in tl.static_range(8):
        first = eights[i] * inverse >= 4.0
        halved = tl.where(first, 0.5, 1.0)
        word = word | (first.to(tl.int32) << (8 + i))
        for j in tl.static_range(2):
            second = fours[2 * i + j] * inverse * halved >= 2.0
            word = word | (second.to(tl.int32) << (16 + 2 * i + j))
            encodes = encodes + (inverse * halved * tl.where(second, 0.5, 1.0),)
            doubled = tl.where(first, 2.0, 1.0) * tl.where(second, 2.0, 1.0)
            decodes = decodes + (scale * doubled,)
    return word, encodes, decodes


@triton.jit
def over_rows(x, V: tl.constexpr):
    """Largest of magnitudes x [BLOCKS, ROWS] of the V.height rows of a square block, per row."""
    HEIGHT: tl.constexpr = V.height
    BLOCKS: tl.constexpr = V.tile_blocks
    ROWS: tl.constexpr = V.tile_rows
    GROUPS: tl.constexpr = BLOCKS * (ROWS // HEIGHT)
    largest = rounding.largest_along(tl.reshape(x, (GROUPS, HEIGHT)), 1)
    spread = tl.broadcast_to(largest[:, None], (GROUPS, HEIGHT))
    return tl.reshape(spread, (BLOCKS, ROWS))


@triton.jit
def sum_of_rows(x, V: tl.constexpr):
    """Sums of x [BLOCKS, ROWS] over the V.height rows of a square block, for each row: the first
    half of the rows plus the second, again and again.
    """
    HEIGHT: tl.constexpr = V.height
    BLOCKS: tl.constexpr = V.tile_blocks
    ROWS: tl.constexpr = V.tile_rows
    GROUPS: tl.constexpr = BLOCKS * (ROWS // HEIGHT)
    total = tl.reshape(x, (GROUPS, HEIGHT))
    for level in tl.static_range(1, 6):
        if (HEIGHT >> level) > 0:
            halves = tl.reshape(total, (GROUPS, 2, HEIGHT >> level))
            halves = tl.permute(halves, (0, 2, 1))
            upper, lower = tl.split(halves)
            total = upper + lower
    spread = tl.broadcast_to(tl.reshape(total, (GROUPS, 1)), (GROUPS, HEIGHT))
    return tl.reshape(spread, (BLOCKS, ROWS))


@triton.jit
def takes_integers(x, encode, scale, amax, V: tl.constexpr):
    """Whether blocks have the smaller squared error as integers, both grids rounded to nearest."""
    N: tl.constexpr = V.n
    BLOCKS: tl.constexpr = V.tile_blocks
    ROWS: tl.constexpr = V.tile_rows
    error = tl.zeros((BLOCKS, ROWS), tl.float32)
    integer_error = tl.zeros((BLOCKS, ROWS), tl.float32)
    bound = tl.full((BLOCKS, ROWS), V.scale.bound, tl.float32)
    for i in tl.static_range(N):
        t = x[i] * encode
        value = rounding.grid_values(
            t,
            0.0,
            V.element.largest,
            V.element.mantissa,
            V.element.min_exponent,
            V.element.code_bits,
            "nearest",
        )
        difference = tl.div_rn(value * scale * amax, bound) - x[i]
        error += difference * difference
        value = rounding.grid_values(
            t * V.integers.inverse_step,
            0.0,
            V.integers.largest,
            V.integers.mantissa,
            V.integers.min_exponent,
            V.element.code_bits,
            "nearest",
        )
        difference = tl.div_rn(value * scale * amax * V.integers.step, bound) - x[i]
        integer_error += difference * difference
    if V.height > 1:
        error = sum_of_rows(error, V)
        integer_error = sum_of_rows(integer_error, V)
    return integer_error < error


@triton.jit
def integer_codes(t, r, marked, limit, V: tl.constexpr):
    """Codes of t: of integers where `marked`."""
    t = rounding.positive_zero(t, V)
    code = rounding.element_codes(t, r, limit, V)
    integer = rounding.grid_codes(
        t * V.integers.inverse_step,
        r,
        V.integers.largest,
        V.integers.mantissa,
        V.integers.min_exponent,
        V,
    )
    return tl.where(marked, integer, code)


@triton.jit
def integer_values(t, r, marked, V: tl.constexpr):
    """Values of t: multiples of the integers' step where `marked`."""
    ROUNDING: tl.constexpr = V.element.rounding
    t = rounding.positive_zero(t, V)
    value = rounding.element_values(t, r, V)
    integer = rounding.grid_values(
        t * V.integers.inverse_step,
        r,
        V.integers.largest,
        V.integers.mantissa,
        V.integers.min_exponent,
        V.element.code_bits,
        ROUNDING,
    )
    return tl.where(marked, integer * V.integers.step, value)
