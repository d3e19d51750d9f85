"""Rounding scaled values t to an element grid, in few instructions and without an FP8 or FP4 cast.

A magnitude a in the binade e = 2^k (k >= the smallest exponent) has the quantum q = e * 2^-m. Adding e * 2^(23-m),
whose float32 ulp is q, rounds a to a multiple of q, ties to even, by the adder itself; subtracting it again leaves
the value. Both are an fma with a product that is exact, so nothing is rounded twice. In the bits of that sum the
position a/q stands in the low bits and k in the exponent: code = position + ((k - kmin) << m) is one shift and one
addition. The constant that would remain is added to the summand, as a multiple of 2^m quanta, so that ties stay even
and the code comes out right modulo its width.

Stochastic: with r = (16 bits + 1/2) / 2^16 the magnitude rounds up from its floor iff r < (a - floor)/q; all terms
are exact in float32. The floor is a - q/2 rounded to nearest. Where a lies on the grid that is a tie and may give a
- q; then (a - floor)/q = 1 > r, and a comes out.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def snap(a, r, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, CODE_BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Magnitudes 0 <= a <= max -> (bits whose low CODE_BITS are position + constant, values on the grid)."""
    START: tl.constexpr = (-((150 - MANTISSA + MIN_EXPONENT) << MANTISSA)) % (1 << CODE_BITS)
    SUMMAND: tl.constexpr = 2.0 ** (23 - MANTISSA) + START * 2.0**-MANTISSA
    SMALLEST: tl.constexpr = 2.0**MIN_EXPONENT
    binade = (a.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    binade = tl.maximum(binade, SMALLEST)
    start = a
    if STOCHASTIC:
        tl.static_assert(START > 0)
        start = tl.fma(binade, -0.5 * 2.0**-MANTISSA, a)
    total = tl.fma(binade, SUMMAND, start)
    value = tl.fma(binade, -SUMMAND, total)
    bits = total.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        quantum = binade * (2.0**-MANTISSA)
        up = r * quantum < a - value
        bits += up.to(tl.int32)
        value += tl.where(up, quantum, 0.0)
    return bits.to(tl.uint32, bitcast=True), value


@triton.jit
def element_codes(
    t,
    r,
    limit,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Codes (uint32) of t, saturating at `limit` (see `code_limit`), which NaN gives too, as fmin has it. The NaN
    that PTX's mul returns has a clear sign; not so everywhere else."""
    a = tl.minimum(tl.abs(t), limit)
    bits, _ = snap(a, r, MANTISSA, MIN_EXPONENT, CODE_BITS, STOCHASTIC)
    SIGN: tl.constexpr = 1 << CODE_BITS
    code = (bits + (bits >> (23 - MANTISSA))) & (SIGN - 1)
    code = code | ((t.to(tl.uint32, bitcast=True) >> (31 - CODE_BITS)) & SIGN)
    if not HARDWARE:
        code = tl.where(t != t, NAN_CODE, code)
    return code


@triton.jit
def code_limit(scale, MAX: tl.constexpr, NAN_VALUE: tl.constexpr):
    """Where codes saturate: MAX, or, under a NaN scale, which makes every t NaN, the value whose code is the NaN's."""
    return tl.where(scale == scale, MAX, NAN_VALUE)


@triton.jit
def element_values(
    t,
    r,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    MAX: tl.constexpr,
    KEEP_NAN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Values (float32) of t on the grid, saturating, with the sign of zero. KEEP_NAN False: NaN gives MAX; the scale
    is NaN then."""
    a = tl.minimum(tl.abs(t), MAX)
    _, value = snap(a, r, MANTISSA, MIN_EXPONENT, CODE_BITS, STOCHASTIC)
    sign = t.to(tl.uint32, bitcast=True) & 0x80000000
    value = (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    if KEEP_NAN:
        value = tl.where(t != t, t, value)
    return value
