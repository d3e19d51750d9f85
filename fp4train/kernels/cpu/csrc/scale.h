/* Block scales: from the maxima of sixteen blocks, one per lane, to the stored scales and the encode and decode factors.
 *
 * NVFP4  S_enc = bound / amax, at most FLT_MAX, 1 for amax = 0; S_dec = 1 / S_enc
 *        s = E4M3(amax_b * (S_enc * (1 / largest))), before TE 2.14 E4M3((amax_b / largest) * S_enc)
 *        encode = min(1 / (s * S_dec), FLT_MAX), decode = s, or s * S_dec if S_dec is that of an outer block
 *        encode-centric: m = E4M3(largest / (amax_b * S_enc)), s = E4M3(1 / m), encode = min(m * S_enc, FLT_MAX)
 * UE5M3  as NVFP4; without a global scale s = UE5M3(amax_b / largest), encode = min(1 / s, FLT_MAX), decode = s
 *        macro-blocks: m = 1 + the upper 8 bits of the mantissa of largest / amax; the byte is that of amax_b m, encode = m 2^(127 - byte),
 *        decode = 2^(byte - 127) (1 / m)
 * MX     byte = biased exponent of amax_b / largest rounded up, or of amax_b less the element's, rounded as named
 *        encode = 2^(127 - byte) * bound, decode = 2^(byte - 127)
 * FP8    encode = largest / amax_b, decode = 1 / encode (stored)
 * All divisions are exact: sixteen blocks share one instruction, so an approximation would gain nothing.
 */
#ifndef FP4_SCALE_H
#define FP4_SCALE_H
#include "element.h"
#include "input.h"
#include "job.h"

static const float float_max = 0x1.fffffep127f;

typedef struct {
    F encode, decode; /* of the tensor, or of each lane's row or outer block */
    F block;          /* S_enc * (1 / largest): from a block's amax to its scale */
} Global;

typedef struct {
    I stored; /* one byte, or float bits */
    F encode, decode;
} Scale;

INLINE void report(const Job *job, K bad) {
    if (k_bits(bad)) __atomic_store_n(job->not_finite, 1, __ATOMIC_RELAXED);
}
INLINE K not_finite(I magnitude) { return i_gt(magnitude, i_set(0x7f7fffff)); }

INLINE F global_encode(float bound, F amax) {
    const K zero = i_eq(i_bits(amax), i_set(0));
    return f_pick(zero, f_set(1.0f), f_min(f_div(f_set(bound), amax), f_set(float_max)));
}

/* The mantissas of macro-blocks. No amax counts as less than 1e-12. */
INLINE F macro_mantissa(float largest, F amax) {
    const F ratio = f_div(f_set(largest), f_bits(i_max(i_bits(amax), i_set(0x2b8cbccc))));
    return f_bits(i_or(i_and(i_bits(ratio), i_set(0x7f8000)), i_set(0x3f800000)));
}

INLINE Global global_scale(const Job *job, F amax) {
    report(job, not_finite(i_and(i_bits(amax), i_set(INT32_MAX))));
    if (job->scale == SCALE_E8M0) {
        const F mantissa = macro_mantissa(job->largest, amax);
        return (Global){mantissa, f_div(f_set(1.0f), mantissa), mantissa};
    }
    const F encode = global_encode(job->bound, amax), decode = f_div(f_set(1.0f), encode);
    report(job, not_finite(i_bits(decode))); /* no float32 number is the scale: the reference says so */
    const F block = f_min(f_mul(encode, f_div(f_set(1.0f), f_set(job->largest))), f_set(float_max));
    return (Global){encode, decode, block};
}

INLINE Scale scale_encode_centric(const Job *job, F amax, Global global, int outer, int element) {
    const F ratio = f_min(f_div(f_set(job->largest), f_mul(amax, global.encode)), f_set(float_max));
    const F m = round_nearest(ratio, element_of(element)).value;
    const Rounded s = round_nearest(f_div(f_set(1.0f), m), element_of(element));
    return (Scale){s.code, f_min(f_mul(m, global.encode), f_set(float_max)), outer ? f_mul(s.value, global.decode) : s.value};
}

/* A scale with a mantissa, of the format `element`, under a global one. */
INLINE Scale scale_under(const Job *job, F amax, Global global, int outer, int element) {
    if (job->formula == FORMULA_ENCODE_CENTRIC) return scale_encode_centric(job, amax, global, outer, element);
    const int divides = job->formula == FORMULA_TE_2_13;
    const F wanted = divides ? f_mul(f_div(amax, f_set(job->largest)), global.encode) : f_mul(amax, global.block);
    if (divides) report(job, not_finite(i_and(i_bits(wanted), i_set(INT32_MAX))));
    const Rounded s = round_nearest(wanted, element_of(element));
    const F decode = f_mul(s.value, global.decode), encode = f_div(f_set(1.0f), decode);
    return (Scale){s.code, f_min(encode, f_set(float_max)), outer ? decode : s.value};
}

/* Whether block scales lie under those of the tensor, of rows or of outer blocks. */
INLINE int has_global(const Job *job) { return job->scale != SCALE_GIVEN && (job->amax || job->outer); }

INLINE Scale scale_ue5m3(const Job *job, F amax, Global global, int outer, int element) {
    if (has_global(job)) return scale_under(job, amax, global, outer, element);
    const Rounded s = round_nearest(f_div(amax, f_set(job->largest)), element_of(element));
    return (Scale){s.code, f_min(f_div(f_set(1.0f), s.value), f_set(float_max)), s.value};
}

/* 2^(byte - 127); byte 0 is a float subnormal. */
INLINE F e8m0_value(I byte) {
    const I value = i_pick(i_eq(byte, i_set(0)), i_set(0x00400000), i_shl(byte, 23));
    return f_bits(i_pick(i_eq(byte, i_set(255)), i_set(0x7fc00000), value));
}

INLINE Scale scale_e8m0(const Job *job, F amax) {
    const Element e = element_of(job->element);
    const int rceil = job->scale_rounding == ROUND_RCEIL;
    I bits = i_bits(rceil ? f_div(amax, f_set(job->largest)) : amax);
    if (job->scale_rounding == ROUND_EVEN) bits = i_add(bits, i_set(1 << (22 - e.mantissa)));
    const I exponent = i_shr(bits, 23), mantissa = i_and(bits, i_set(0x7fffff)), zero = i_set(0);
    I byte = exponent;
    if (rceil) { /* a subnormal up to 2^-127 is byte 0 */
        const I above = i_pick(i_eq(exponent, zero), i_set(0x400000), zero);
        byte = i_pick(i_gt(mantissa, above), i_add(exponent, i_set(1)), exponent);
    } else {
        if (job->scale_rounding == ROUND_CEIL) byte = i_pick(i_gt(mantissa, zero), i_add(exponent, i_set(1)), exponent);
        byte = i_max(i_sub(byte, i_set(e.max_exponent)), zero);
    }
    byte = i_min(byte, i_set(254));
    const F encode = f_pick(i_eq(byte, zero), f_set(rceil ? 1.0f : 0x1p126f), e8m0_value(i_sub(i_set(254), byte)));
    return (Scale){byte, f_mul(encode, f_set(job->bound)), e8m0_value(byte)};
}

INLINE Scale scale_macro(const Job *job, F amax, Global global) {
    const Scale s = scale_e8m0(job, f_min(f_mul(amax, global.encode), f_set(float_max)));
    return (Scale){s.stored, f_mul(s.encode, global.encode), f_mul(s.decode, global.decode)};
}

INLINE Scale scale_float(const Job *job, F amax) {
    F encode = f_div(f_set(job->largest), amax);
    encode = f_pick(not_finite(i_bits(encode)), f_set(job->scale_limit), encode);
    if (job->scale == SCALE_POW2) encode = f_bits(i_and(i_bits(encode), i_set(0x7f800000)));
    encode = f_pick(i_eq(i_bits(amax), i_set(0)), f_set(1.0f), encode);
    const F decode = f_div(f_set(1.0f), encode);
    return (Scale){i_bits(decode), encode, decode};
}

/* `amax`: of each lane's block. `global`: of the tensor or the lane's row or, if `outer`, outer block; undefined without any. */
INLINE Scale block_scale(const Job *job, I amax, Global global, int outer) {
    report(job, not_finite(amax));
    if (job->scale == SCALE_E4M3) return scale_under(job, f_bits(amax), global, outer, E4M3); /* first: faster than a jump table */
    switch (job->scale) {
    case SCALE_E8M0: return outer ? scale_macro(job, f_bits(amax), global) : scale_e8m0(job, f_bits(amax));
    case SCALE_UE5M3: return scale_ue5m3(job, f_bits(amax), global, outer, UE5M3);
    case SCALE_UE5M3_IEEE: return scale_ue5m3(job, f_bits(amax), global, outer, UE5M3_IEEE);
    case SCALE_GIVEN: return (Scale){i_set(0), global.encode, f_set(1.0f)};
    default: return scale_float(job, f_bits(amax));
    }
}

/* The amax that the scales of a row take besides those of its blocks; 0 where they take none, or that of tiles. */
INLINE float row_amax(const Job *job, int64_t row) {
    return job->amax && !job->tiled ? job->amax[band_of(row, job->amax_rows) * job->amax_stride] : 0.0f;
}

/* The amaxes of the tiles, `across` in a row of them, that a strip of a row lies in, for each of its blocks of `cols` columns. */
INLINE F tile_amaxes(const float *tiles, int64_t across, int64_t cols, int64_t band, int64_t col) {
    const int64_t blocks = whole_blocks(OUTER_COLUMNS, cols), first = col / OUTER_COLUMNS;
    float amax[16] = {0};
    for (int64_t i = 0; i < 16 && first + whole_blocks(i, blocks) < across; i++)
        amax[i] = tiles[band * across + first + whole_blocks(i, blocks)];
    return f_load(amax);
}

/* The scales of a row that do not depend on its blocks; lanes are one row (row-wise) or sixteen rows (column-wise). */
INLINE Global row_scale(const Job *job, F given) {
    if (has_global(job)) return global_scale(job, given);
    return (Global){given, f_set(1.0f), f_set(1.0f)};
}
/* Bytes with a mantissa, under which a negative zero is coded as zero. */
INLINE int scale_has_mantissa(int scale) { return scale == SCALE_E4M3 || scale == SCALE_UE5M3 || scale == SCALE_UE5M3_IEEE || scale == SCALE_IF4; }
INLINE int scale_is_byte(int scale) { return scale_has_mantissa(scale) || scale == SCALE_E8M0; }
/* Whether decoded values are exact in BF16: such scales have four significant bits, and so have elements of three bits of mantissa. */
INLINE int exact_in_bf16(int element, int scale, int outer) {
    if (scale == SCALE_IF4) return 0;
    return (scale_has_mantissa(scale) && !outer && element_of(element).mantissa <= 3) || scale == SCALE_GIVEN || scale == SCALE_HIF4;
}
/* Whether no product of a BF16 number other than 0, at least 2^-133, and the encode factor of a block, at least bound / (448 amax) and so
 * 2^-16, rounds to 0: a fused multiply-add of +0 then equals the sum of the product and +0. */
INLINE int no_underflow(const Job *job) {
    return job->x.input == INPUT_BF16 && *job->amax <= 128 * job->bound && !flushes_subnormals();
}
/* Scales that need more of a block than its maximum: see group.h. */
INLINE int is_levelled(const Job *job) { return job->scale == SCALE_HIF4 || job->scale == SCALE_IF4; }
INLINE int is_four_over_six(const Job *job) { return job->formula >= FOUR_OVER_SIX_MAE; }
/* E2M1 in blocks of sixteen with such scales, and values exact in BF16: the kernels have variants for these, but not for few
 * random bits, or ties away from zero. */
INLINE int is_nvfp4(const Job *job) {
    return job->element == E2M1 && job->block_cols == 16 && scale_has_mantissa(job->scale) && !job->outer && !job->few_bits && !job->away &&
           job->scale != SCALE_IF4;
}
#endif
