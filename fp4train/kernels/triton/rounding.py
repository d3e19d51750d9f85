"""Device functions: exact casts, maxima that keep NaN, rounding to an element grid, random bits.

Casts. BF16 -> float32 is a shift of the bits: exact for subnormals too, and free in SASS. float32
-> BF16 is the hardware's cast (nearest even), or, in the interpreter, which rounds ties upwards,
the same in integers.

Rounding of scaled values t to an element grid, in few instructions. A magnitude a in the binade
e = 2^k (k >= the smallest exponent) has the quantum q = e * 2^-m.
Adding e * 2^(23-m), whose float32 ulp is q, rounds a to a multiple of q, ties to even, by the adder
itself; subtracting it again leaves the value. Both are an fma with a product that is exact, so
nothing is rounded twice. In the bits of that sum the position a/q stands in the low bits and k in
the exponent: code = position + ((k - kmin) << m) is one shift and one addition. The constant that
would remain is added to the summand, as a multiple of 2^m quanta, so that ties stay even and the
code comes out right modulo its width.

FP8 to nearest on SM 8.9 and later: the hardware's cast, which saturates, gives NaN the code 0x7f,
and keeps the sign of zero.

Stochastic E2M1: by a carry (`carried`). Other formats: with r = (16 bits + 1/2) / 2^16 the magnitude
rounds up from its floor iff r < (a - floor)/q; all terms are exact in float32. The floor is a - q/2
rounded to nearest. Where a lies on the grid that is a tie and may give a - q; then (a - floor)/q =
1 > r, and a comes out. With n random bits r = (bits + 1) / 2^n, and the magnitude rounds up iff r <=
(a - floor)/q. Ties go away from zero where r is 1/2.

Random bits: Philox4x32-10 (Salmon et al., SC 2011) with fp4train's counters: (column // 8, row,
step*8 + operand, layer), key = the run's seed. One call serves eight neighbours of a row: element j
takes half j % 2 (0 = low) of word j // 2. `tl.rand` lays its counter out otherwise.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def as_float(x):
    """BF16, FP16 or float32 -> float32, exact."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def as_bf16(x, HARDWARE: tl.constexpr):
    """float32 -> BF16, to nearest, ties to even; NaN stays NaN."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x != x, 0x7FFF, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def largest(a, b):
    """max(a, b), NaN if either is: one instruction (max.NaN.f32) on SM 8.0."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_eight(x):
    """Largest |x| over the last axis of [A, G, 8] -> [A, G]; the eight lie in one thread."""
    a, b = tl.split(tl.reshape(tl.abs(x), (x.shape[0], x.shape[1], 4, 2)))
    a, b = tl.split(tl.reshape(largest(a, b), (x.shape[0], x.shape[1], 2, 2)))
    a, b = tl.split(largest(a, b))
    return largest(a, b)


@triton.jit
def largest_along(x, AXIS: tl.constexpr):
    """Largest of magnitudes x >= 0 along AXIS. As integers they order like floats, with NaN above
    infinity.
    """
    return tl.max(x.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def snap(
    a,
    r,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Magnitudes 0 <= a <= max -> (bits whose low CODE_BITS are position + constant, values on the
    grid). ROUNDING: as `Elements.rounding`.

    Without a mantissa the constant may be odd, and an odd sum would turn ties to odd positions: the
    one is then added to the bits. It is not 0 where the sum begins at a - q/2, below 0.
    """
    LEAST: tl.constexpr = 0 if ROUNDING == "nearest" else 1 << CODE_BITS
    CONSTANT: tl.constexpr = (-((150 - MANTISSA + MIN_EXPONENT) << MANTISSA)) % (1 << CODE_BITS)
    ODD: tl.constexpr = CONSTANT % 2
    START: tl.constexpr = CONSTANT - ODD if CONSTANT > ODD else LEAST
    SUMMAND: tl.constexpr = 2.0 ** (23 - MANTISSA) + START * 2.0**-MANTISSA
    SMALLEST: tl.constexpr = 2.0**MIN_EXPONENT
    binade = (a.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    binade = tl.maximum(binade, SMALLEST)
    start = a
    if ROUNDING != "nearest":
        start = tl.fma(binade, -0.5 * 2.0**-MANTISSA, a)
    total = tl.fma(binade, SUMMAND, start)
    value = tl.fma(binade, -SUMMAND, total)
    bits = total.to(tl.int32, bitcast=True)
    if ODD:
        bits += 1
    if ROUNDING != "nearest":
        quantum = binade * (2.0**-MANTISSA)
        if ROUNDING == "stochastic":
            up = r * quantum < a - value
        elif ROUNDING == "few_bits":
            up = r * quantum <= a - value
        elif ROUNDING == "midpoint":
            up = (a - value) + r * quantum >= quantum
        else:
            up = 0.5 * quantum <= a - value
        bits += up.to(tl.int32)
        value += tl.where(up, quantum, 0.0)
    return bits.to(tl.uint32, bitcast=True), value


@triton.jit
def positive_zero(t, V: tl.constexpr):
    """t, whose negative zeros become zero unless V.scale.signed_zero."""
    if not V.scale.signed_zero:
        t = t + 0.0
    return t


@triton.jit
def code_limit(scale, V: tl.constexpr):
    """The value at which codes saturate: the largest one, or, under a NaN scale, which makes every
    t NaN, the value whose code is the NaN's.
    """
    return tl.where(scale == scale, V.element.largest, V.element.nan_value)


@triton.jit
def element_codes(t, r, limit, V: tl.constexpr):
    """Codes (uint32) of t, saturating at `limit` (see `code_limit`), which NaN gives too, as fmin
    has it. The NaN that PTX's mul returns has a clear sign; not so everywhere else.
    """
    if V.element.rounding == "nearest" and casts(V):
        return as_fp8(positive_zero(t, V), V).to(tl.uint8, bitcast=True).to(tl.uint32)
    return grid_codes(t, r, limit, V.element.mantissa, V.element.min_exponent, V)


@triton.jit
def casts(V: tl.constexpr):
    """Whether the GPU casts to and from the format of the elements."""
    return V.element.cast != "" and cuda_capability_geq(8, 9)


@triton.jit
def as_e4m3(t):
    """float32 -> E4M3, to nearest, ties to even, saturating: PTX's cvt.rn.satfinite."""
    return t.to(tl.float8e4nv)


@triton.jit
def as_e5m2(t):
    """float32 -> E5M2, as `as_e4m3`."""
    return t.to(tl.float8e5)


@triton.jit
def of_fp8(x):
    """FP8 -> float32, exact: PTX's cvt.rn.f16x2, then from float16."""
    return x.to(tl.float32)


@triton.jit
def as_fp8(t, V: tl.constexpr):
    """float32 -> the format of the elements."""
    if V.element.cast == "e4m3":
        return as_e4m3(t)
    else:
        return as_e5m2(t)


@triton.jit
def values_of_fp8(code, V: tl.constexpr):
    """uint8 codes of the format of the elements -> float32."""
    if V.element.cast == "e4m3":
        return of_fp8(code.to(tl.float8e4nv, bitcast=True))
    else:
        return of_fp8(code.to(tl.float8e5, bitcast=True))


@triton.jit
def carried(a, half, V: tl.constexpr):
    """Magnitudes 0 <= a <= 6, sixteen random bits -> (E2M1 codes, values), rounded stochastically.

    From 1 on, the 22 bits below the mantissa bit of the format are the fraction, and a carry out of
    fraction + (2^22 - 1 - threshold) rounds up. Below 1 the grid is that of [1, 2) shifted, so 1 is
    added first. That sum is rounded up, which changes no comparison with a threshold of 17 bits;
    rounding to nearest could.
    """
    small = a < 1.0
    bits = tl.where(small, one_more(a, V), a).to(tl.uint32, bitcast=True)
    chosen = (bits + (((half ^ 0xFFFF) << 6) | 0x1F)) & 0xFFC00000
    code = (chosen >> 22) - tl.where(small, 254, 252).to(tl.uint32)
    return code, chosen.to(tl.float32, bitcast=True) - tl.where(small, 1.0, 0.0)


@triton.jit
def one_more(a, V: tl.constexpr):
    """a + 1 of 0 <= a < 1, rounded up."""
    if V.hardware:
        return tl.inline_asm_elementwise(
            "add.rp.f32 $0, $1, 0f3F800000;", "=r,r", [a], dtype=tl.float32, is_pure=True, pack=1
        )
    total = a + 1.0
    below = (total - 1.0 < a).to(tl.uint32)
    return (total.to(tl.uint32, bitcast=True) + below).to(tl.float32, bitcast=True)


@triton.jit
def grid_codes(t, r, limit, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, V: tl.constexpr):
    """`element_codes` of a format with this mantissa and exponent."""
    ROUNDING: tl.constexpr = V.element.rounding
    a = tl.minimum(tl.abs(t), limit)
    SIGN: tl.constexpr = 1 << V.element.code_bits
    if ROUNDING == "carry":
        code, _ = carried(a, r, V)
    else:
        bits, _ = snap(a, r, MANTISSA, MIN_EXPONENT, V.element.code_bits, ROUNDING)
        code = (bits + (bits >> (23 - MANTISSA))) & (SIGN - 1)
    if V.scale.signed_zero or V.integers.step > 0.0:
        code = code | ((t.to(tl.uint32, bitcast=True) >> (31 - V.element.code_bits)) & SIGN)
    else:
        code = tl.where(t < 0.0, code | SIGN, code)
    if not V.hardware:
        code = tl.where(t != t, V.element.nan_code, code)
    return code


@triton.jit
def grid_values(
    t,
    r,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Values (float32) of t on a grid, saturating, with the sign of zero; NaN gives LARGEST."""
    a = tl.minimum(tl.abs(t), LARGEST)
    _, value = snap(a, r, MANTISSA, MIN_EXPONENT, CODE_BITS, ROUNDING)
    return signed(value, t)


@triton.jit
def signed(magnitude, t):
    """float32 magnitudes with the signs of t."""
    sign = t.to(tl.uint32, bitcast=True) & 0x80000000
    return (magnitude.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def element_values(t, r, V: tl.constexpr):
    """Values (float32) of t on the grid, saturating, with the sign of zero. Under a scale of one
    byte, which is NaN itself then, NaN gives the largest value.
    """
    ROUNDING: tl.constexpr = V.element.rounding
    t = positive_zero(t, V)
    if ROUNDING == "carry":
        _, magnitude = carried(tl.minimum(tl.abs(t), V.element.largest), r, V)
        value = signed(magnitude, t)
    elif ROUNDING == "nearest" and casts(V):
        value = of_fp8(as_fp8(t, V))
    else:
        value = grid_values(
            t,
            r,
            V.element.largest,
            V.element.mantissa,
            V.element.min_exponent,
            V.element.code_bits,
            ROUNDING,
        )
    if V.scale.kind == "fp32" or V.scale.kind == "pow2":
        value = tl.where(t != t, t, value)
    return value


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds. uint32 tensors of one shape (c2, c3 and the key may be scalars) -> four of
    them.
    """
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_words(eight, row, anchor, words):
    """The four words of each group of eight columns. eight, row: integer tensors that broadcast.
    words: the key's two and those of the counter that do not depend on the element (step*8 +
    operand, layer, offsets of columns / 8 and of rows), int32 bit patterns; the third may be a
    pointer to one: the step's, in a CUDA graph.

    anchor: zeros of that shape in the layout in which the words are needed, in disguise (a sign bit
        known to us, not
    to Triton): it keeps Triton from drawing them in another layout and sending each through shared
    memory. 0 where there is no such danger.
    """
    key0, key1, counter2, counter3, col_group, row_offset = words
    if counter2.dtype.is_ptr():
        counter2 = tl.load(counter2)
    zero = (eight * 0 + row * 0).to(tl.uint32) + anchor
    c0 = eight.to(tl.uint32) + col_group.to(tl.uint32) + zero
    c1 = row.to(tl.uint32) + row_offset.to(tl.uint32) + zero
    return philox4x32(
        c0,
        c1,
        counter2.to(tl.uint32) + zero,
        counter3.to(tl.uint32) + zero,
        key0.to(tl.uint32),
        key1.to(tl.uint32),
    )


@triton.jit
def fraction(half):
    """(bits + 1/2) / 2^16 of 16 bits held in a uint32: as the mantissa of a number in [1, 2), so
    without an int-to-float cast.
    """
    return ((half << 7) | 0x3F800040).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def threshold(half, V: tl.constexpr):
    """What the fraction of a position is compared with, of 16 random bits: `fraction`, or, of the
    upper n = V.element.random_bits of them, (bits + 1) / 2^n; or what is added to it, (bits + 1/2) / 2^n.
    `carried` takes the bits themselves.
    """
    if V.element.rounding == "carry":
        return half
    elif V.element.rounding == "stochastic":
        return fraction(half)
    else:
        STEP: tl.constexpr = 2.0**-V.element.random_bits * (
            0.5 if V.element.rounding == "midpoint" else 1.0
        )
        upper = (half >> (16 - V.element.random_bits)) << (23 - V.element.random_bits)
        return (upper | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - STEP)


@triton.jit
def eight_halves(eight, row, anchor, words):
    """Sixteen random bits (uint32) of each column of groups of eight: [..., G] -> [..., G, 8]. See
    `random_words`.
    """
    w0, w1, w2, w3 = random_words(eight, row, anchor, words)
    j = tl.arange(0, 8)
    low = tl.where(j < 2, tl.expand_dims(w0, -1), tl.expand_dims(w1, -1))
    high = tl.where(j < 6, tl.expand_dims(w2, -1), tl.expand_dims(w3, -1))
    word = tl.where(j < 4, low, high)
    return (word >> (16 * (j & 1)).to(tl.uint32)) & 0xFFFF


@triton.jit
def eight_fractions(eight, row, anchor, words, V: tl.constexpr):
    """Thresholds [A, G, 8] in (0, 1] of groups of eight columns [A, G], or 0 without random bits.
    See `random_words`.
    """
    r = 0.0
    if V.element.random_bits > 0:
        r = threshold(eight_halves(eight, row, anchor, words), V)
    return r
