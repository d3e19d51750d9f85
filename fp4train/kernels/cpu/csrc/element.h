/* Rounding to an element format, on its integer grid.
 *
 * A magnitude in the binade 2^e lies on a grid of quantum 2^(max(e, emin) - m). To nearest: adding the power of two M whose
 * last bit is one quantum makes the adder round, ties to even; the integer M + k - M is the grid position, and subtracting M
 * gives the value. Stochastic: the position u = |t| / quantum is exact, and is rounded up if its fraction exceeds
 * (bits + 1/2) / 65536. The code is k + ((max(e, emin) - emin) << m): at k = 2^(m+1) it carries into the exponent.
 */
#ifndef FP4_ELEMENT_H
#define FP4_ELEMENT_H
#include <string.h>

#include "job.h"

typedef struct {
    int mantissa;        /* m */
    int32_t emin;        /* float bits of the smallest normal number */
    float max;           /* largest finite value */
    int max_exponent;    /* exponent of the largest power of two */
    int sign_shift;      /* from bit 31 to the sign of a code */
} Element;

/* (1 + M / 2^m) 2^(E - b), or M / 2^m 2^(1 - b) for E = 0, of a code without sign. */
INLINE float own_magnitude(int element, int code) {
    const int mantissa = own_mantissa(element), stored = code >> mantissa, exponent = stored > 1 ? stored : 1;
    const int significand = (code & ((1 << mantissa) - 1)) + (stored ? 1 << mantissa : 0);
    const uint32_t quantum = (uint32_t)(127 + exponent - own_bias(element) - mantissa) << 23;
    float value;
    memcpy(&value, &quantum, sizeof value);
    return (float)significand * value;
}

INLINE Element own_element(int element) {
    const int bits = own_bits(element), mantissa = own_mantissa(element);
    const float max = own_magnitude(element, (1 << (bits - 1)) - 1 - own_nan(element));
    int32_t max_bits;
    memcpy(&max_bits, &max, sizeof max);
    return (Element){mantissa, (128 - own_bias(element)) << 23, max, (max_bits >> 23) - 127, 32 - bits};
}

/* The parameters of the format. With a constant argument they are folded at compile time, which makes E2M1 fast. */
INLINE Element element_of(int element) {
    switch (element) {
    case E2M1: return (Element){1, 0x3f800000, 6.0f, 2, 28};
    case E2M3: return (Element){3, 0x3f800000, 7.5f, 2, 26};
    case E3M2: return (Element){2, 0x3e800000, 28.0f, 4, 26};
    case E4M3: return (Element){3, 0x3c800000, 448.0f, 8, 24};
    case UE5M3: return (Element){3, 0x38800000, 114688.0f, 16, 23}; /* the sign would be bit 8; scales have none */
    case UE5M3_IEEE: return (Element){3, 0x38800000, 61440.0f, 15, 23};
    case E5M2: return (Element){2, 0x38800000, 57344.0f, 15, 24};
    default: return own_element(element);
    }
}

typedef struct {
    I code;  /* with its sign, in the low bits */
    F value; /* with its sign */
} Rounded;

INLINE I grid_exponent(F magnitude, Element e) {
    return i_max(i_and(i_bits(magnitude), i_set(0x7f800000)), i_set(e.emin));
}
INLINE I signed_code(I position, I exponent, F t, Element e) {
    const I code = i_add(position, i_shr_by(i_sub(exponent, i_set(e.emin)), 23 - e.mantissa));
    return i_blend_bits(i_set(1 << (31 - e.sign_shift)), i_shr_by(i_bits(t), e.sign_shift), code);
}
INLINE F with_sign(F magnitude, F t) {
    return f_bits(i_blend_bits(i_set(INT32_MIN), i_bits(t), i_bits(magnitude)));
}

INLINE Rounded round_nearest(F t, Element e) {
    const F magnitude = f_min_magnitude(t, f_set(e.max));
    const I exponent = grid_exponent(magnitude, e);
    const I anchor = i_add(exponent, i_set((23 - e.mantissa) << 23));
    const F sum = f_add(magnitude, f_bits(anchor));
    return (Rounded){signed_code(i_sub(i_bits(sum), anchor), exponent, t, e),
                     with_sign(f_sub(sum, f_bits(anchor)), t)};
}

/* The same for E2M1. The three addends are in a table indexed by the last three bits of the exponents 127 to 129. Their last bits are
 * the number of codes below the binade, so the last bits of the sum are the code. Below 1/4 the index may select any of the three;
 * all round to 0, but the code is right only if smaller exponents are raised to 127 first. */
INLINE Rounded round_nearest_e2m1(F t, int codes) {
    static const float anchors[8] = {0x1p23f + 2, 0x1p24f + 8, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f};
    const F magnitude = f_min_magnitude(t, f_set(6.0f));
    const I bits = codes ? i_max(i_bits(magnitude), i_set(0x3f800000)) : i_bits(magnitude);
    const F anchor = f_table8(anchors, i_shr(bits, 23)), sum = f_add(magnitude, anchor);
    return (Rounded){i_blend_bits(i_set(7), i_bits(sum), i_shr(i_bits(t), 28)), with_sign(f_sub(sum, anchor), t)};
}

/* The values alone, of magnitudes: of E2M1, and of the integers up to 7. */
INLINE F nearest_e2m1(F magnitude) {
    static const float anchors[8] = {0x1p23f, 0x1p24f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f};
    const F most = f_min(magnitude, f_set(6.0f)), anchor = f_table8(anchors, i_shr(i_bits(most), 23));
    return f_sub(f_add(most, anchor), anchor);
}
INLINE F nearest_integer(F magnitude) {
    return f_sub(f_add(f_min(magnitude, f_set(7.0f)), f_set(0x1p23f)), f_set(0x1p23f));
}

/* Random bits at 6..21 of a lane, from its low or its high half; other bits are undefined. */
INLINE I random_low(I words) { return i_shl(words, 6); }
INLINE I random_high(I words) { return i_shr(words, 10); }

INLINE Rounded round_stochastic(F t, I random, Element e) {
    const F magnitude = f_min_magnitude(t, f_set(e.max));
    const I exponent = grid_exponent(magnitude, e);
    const F inverse = f_bits(i_sub(i_set((int32_t)((uint32_t)(254 + e.mantissa) << 23)), exponent));
    const F quantum = f_bits(i_sub(exponent, i_set(e.mantissa << 23)));
    const F position = f_mul(magnitude, inverse);
    const F below = f_floor(position);
    /* (bits + 1/2) / 65536: as the mantissa of a float in [1, 2) */
    const F threshold = f_sub(f_bits(i_blend_bits(i_set(0xffff << 7), i_shl(random, 1), i_set(0x3f800040))), f_set(1.0f));
    const F chosen = f_add_where(f_gt(f_sub(position, below), threshold), below, f_set(1.0f));
    return (Rounded){signed_code(i_of_f(chosen), exponent, t, e), with_sign(f_mul(chosen, quantum), t)};
}

/* Ties away from zero: up if the fraction is at least a half, which is not below its predecessor. */
INLINE Rounded round_away(F t, Element e) {
    const F magnitude = f_min_magnitude(t, f_set(e.max));
    const I exponent = grid_exponent(magnitude, e);
    const F inverse = f_bits(i_sub(i_set((int32_t)((uint32_t)(254 + e.mantissa) << 23)), exponent));
    const F quantum = f_bits(i_sub(exponent, i_set(e.mantissa << 23)));
    const F position = f_mul(magnitude, inverse);
    const F below = f_floor(position);
    const F chosen = f_add_where(f_gt(f_sub(position, below), f_set(0x1.fffffep-2f)), below, f_set(1.0f));
    return (Rounded){signed_code(i_of_f(chosen), exponent, t, e), with_sign(f_mul(chosen, quantum), t)};
}
INLINE Rounded round_plainly(F t, Element e, int away) { return away ? round_away(t, e) : round_nearest(t, e); }

/* With n random bits r, the upper ones: up if the fraction is at least (r + 1) / 2^n, which is not below its predecessor; by middles, if
 * its sum with (r + 1/2) / 2^n is at least 1. few: n, | 256 by middles. */
INLINE Rounded round_few(F t, I random, Element e, int few) {
    const F magnitude = f_min_magnitude(t, f_set(e.max));
    const I exponent = grid_exponent(magnitude, e);
    const F inverse = f_bits(i_sub(i_set((int32_t)((uint32_t)(254 + e.mantissa) << 23)), exponent));
    const F quantum = f_bits(i_sub(exponent, i_set(e.mantissa << 23)));
    const F position = f_mul(magnitude, inverse);
    const F below = f_floor(position);
    const int n = few & 255;
    const F fraction = f_sub(position, below), step = f_bits(i_set((127 - n) << 23));
    const I drawn = i_and(i_shr_by(random, 22 - n), i_set((1 << n) - 1));
    K up;
    if (few > n) {
        const F middle = f_mul(f_add(f_of_i(drawn), f_set(0.5f)), step);
        up = f_gt(f_add(fraction, middle), f_set(0x1.fffffep-1f));
    } else {
        const F limit = f_mul(f_of_i(i_add(drawn, i_set(1))), step);
        up = f_gt(fraction, f_bits(i_sub(i_bits(limit), i_set(1))));
    }
    const F chosen = f_add_where(up, below, f_set(1.0f));
    return (Rounded){signed_code(i_of_f(chosen), exponent, t, e), with_sign(f_mul(chosen, quantum), t)};
}

/* As a job rounds; E2M1 with all sixteen bits has the faster function below. */
INLINE Rounded round_drawn(F t, I random, Element e, int few) {
    return few ? round_few(t, random, e, few) : round_stochastic(t, random, e);
}

/* The same for E2M1 with integers: from 1 on, the 22 bits below the mantissa bit of the format are the fraction, and a carry out of
 * fraction + (2^22 - 1 - threshold) rounds up. Below 1 the grid is that of [1, 2) shifted, so 1 is added first. That sum is
 * rounded up, which changes no comparison with a threshold of 17 bits; rounding to nearest could. */
INLINE Rounded round_stochastic_e2m1(F t, I random) {
    const F one = f_set(1.0f), magnitude = f_min_magnitude(t, f_set(6.0f));
    const K small = f_gt(one, magnitude);
    const I bits = i_bits(f_add_up_where(small, magnitude, one));
    const I complement = i_blend_not(i_set(0xffff << 6), random, i_set(0x1f));
    const I chosen = i_and(i_add(bits, complement), i_set((int32_t)0xffc00000));
    const I code = i_sub(i_sub_where(small, i_shr(chosen, 22), i_set(2)), i_set(252));
    return (Rounded){i_blend_bits(i_set(8), i_shr(i_bits(t), 28), code),
                     with_sign(f_sub_where(small, f_bits(chosen), one), t)};
}

/* The same for the integers from -7 to 7: their grid is uniform, and its quantum 1. */
INLINE Rounded round_nearest_integer(F t) {
    const F sum = f_add(f_min_magnitude(t, f_set(7.0f)), f_set(0x1p23f)), integer = f_sub(sum, f_set(0x1p23f));
    return (Rounded){i_blend_bits(i_set(8), i_shr(i_bits(t), 28), i_and(i_bits(sum), i_set(7))), with_sign(integer, t)};
}
INLINE Rounded round_stochastic_integer(F t, I random) {
    const F magnitude = f_min_magnitude(t, f_set(7.0f)), below = f_floor(magnitude);
    const F threshold = f_sub(f_bits(i_blend_bits(i_set(0xffff << 7), i_shl(random, 1), i_set(0x3f800040))), f_set(1.0f));
    const F chosen = f_add_where(f_gt(f_sub(magnitude, below), threshold), below, f_set(1.0f));
    return (Rounded){i_blend_bits(i_set(8), i_shr(i_bits(t), 28), i_of_f(chosen)), with_sign(chosen, t)};
}

/* Value of a code: its sign, and its exponent and mantissa moved into a float's; subnormals are integers times a quantum
 * (arithmetic on float subnormals is avoided: a process may flush them). */
INLINE F element_value(I code, int element) {
    const Element e = element_of(element);
    const int bits = 31 - e.sign_shift;
    const I magnitude = i_and(code, i_set((1 << bits) - 1));
    const I sign = i_shl_by(i_and(code, i_set(1 << bits)), e.sign_shift);
    const I normal = i_add(i_shl_by(magnitude, 23 - e.mantissa), i_set(e.emin - (1 << 23)));
    const F quantum = f_bits(i_set(e.emin - (e.mantissa << 23)));
    const I subnormal = i_bits(f_mul(f_of_i(magnitude), quantum));
    I value = i_pick(i_gt(i_set(1 << e.mantissa), magnitude), subnormal, normal);
    if (element == E4M3) value = i_pick(i_eq(magnitude, i_set(0x7f)), i_set(0x7fc00000), value);
    if (element == UE5M3_IEEE) value = i_pick(i_gt(magnitude, i_set(0xf7)), i_set(0x7fc00000), value);
    if (element == UE5M3) value = i_pick(i_eq(magnitude, i_set(0xff)), i_set(0x7fc00000), value);
    if (element & OWN_ELEMENT && own_nan(element))
        value = i_pick(i_eq(magnitude, i_set((1 << bits) - 1)), i_set(0x7fc00000), value);
    if (element == E5M2) value = i_pick(i_gt(magnitude, i_set(0x7b)),
                                        i_add(i_set(0x7f800000), i_shl(i_sub(magnitude, i_set(0x7c)), 21)), value);
    return f_bits(i_or(value, sign));
}

static const float e2m1_values[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* The values of the sixteen codes of a packed format; codes that it lacks have any value. */
INLINE void packed_values(int element, float values[16]) {
    if (element == E2M1) {
        memcpy(values, e2m1_values, sizeof e2m1_values);
        return;
    }
    const int sign = 1 << (own_bits(element) - 1);
    for (int code = 0; code < 16; code++) {
        const float magnitude = own_magnitude(element, code & (sign - 1));
        values[code] = code & sign ? -magnitude : magnitude;
        if (own_nan(element) && (code & (sign - 1)) == sign - 1) values[code] = __builtin_nanf("");
    }
}
#endif
