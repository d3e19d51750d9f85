/* Hadamard transform of n = 16, 32, 64 or 128 neighbours: y = (x * signs) H_n / sqrt(n), in float32 from BF16, rounded to BF16.
 *
 * The neighbours are vectors and a lane is one transform, so the butterfly of strides 1, 2, 4, … needs no shuffles. Sixteen are in
 * registers; the strides above run over memory, which the first cache holds.
 */
#ifndef FP4_HADAMARD_H
#define FP4_HADAMARD_H
#include "input.h"

/* +1 or -1 per column, in all lanes. */
typedef struct {
    F of[16];
} Signs;

INLINE Signs signs_of(uint32_t bits) {
    Signs signs;
    for (int i = 0; i < 16; i++) signs.of[i] = f_set(bits >> i & 1 ? -1.0f : 1.0f);
    return signs;
}

/* Sums run on the adders, differences on the multipliers, so both units are busy. */
#define STAGE(stride) \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & stride)) { \
        const F a = x[i], b = x[i + stride]; \
        x[i] = f_add(a, b); \
        x[i + stride] = f_sub_by_multiplier(a, b); \
    }
/* The signs and the stage of stride 1: the signs of every second input cost nothing. */
INLINE void first_stage(F *x, const Signs *signs) {
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        const F a = f_mul(x[i], signs->of[i]), b = x[i + 1], sign = signs->of[i + 1];
        x[i] = f_add_exact_product(a, b, sign);
        x[i + 1] = f_sub_exact_product(a, b, sign);
    }
}
INLINE void hadamard_16_sums(F *x, const Signs *signs) { /* unrolled, so that x stays in registers */
    first_stage(x, signs);
    STAGE(2)
    STAGE(4)
    STAGE(8)
}
INLINE void hadamard_16(F *x, const Signs *signs) {
    hadamard_16_sums(x, signs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = f_bits(round_to_bf16_fast(f_mul(x[i], f_set(0.25f))));
}
/* max|y| of the sixteen, as float bits, before the factor 1/4 and the rounding: both are monotonic and are applied to the maximum.
 * max(|a + b|, |a - b|) = |a| + |b| saves half of the last stage. */
INLINE I hadamard_16_max(F *x, const Signs *signs) {
    I largest = i_set(0);
    first_stage(x, signs);
    STAGE(2)
    STAGE(4)
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        largest = i_max(largest, i_bits(f_add(f_bits(magnitude_bits(x[i])), f_bits(magnitude_bits(x[i + 8])))));
    return largest;
}

/* 1 / sqrt(n), as float32. */
INLINE F hadamard_factor(int size) {
    return f_set(size == 16 ? 0.25f : size == 32 ? 0x1.6a09e6p-3f : size == 64 ? 0.125f : 0x1.6a09e6p-4f);
}

/* +1 or -1 per column of a transform. */
INLINE void signs_of_group(const uint32_t *bits, int size, float *signs) {
    for (int i = 0; i < size; i++) signs[i] = bits[i / 32] >> i % 32 & 1 ? -1.0f : 1.0f;
}

/* Without the factor and the rounding. */
NOINLINE void butterfly(F *group, int size, const float *signs) {
    for (int at = 0; at < size; at += 16) {
        F x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) x[i] = f_mul(group[at + i], f_set(signs[at + i]));
        STAGE(1)
        STAGE(2)
        STAGE(4)
        STAGE(8)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) group[at + i] = x[i];
    }
    for (int stride = 16; stride < size; stride *= 2)
        for (int at = 0; at < size; at += 2 * stride)
            for (int i = at; i < at + stride; i++) {
                const F a = group[i], b = group[i + stride];
                group[i] = f_add(a, b);
                group[i + stride] = f_sub(a, b);
            }
}
INLINE void hadamard_group(F *group, int size, const float *signs) {
    butterfly(group, size, signs);
    for (int i = 0; i < size; i++) group[i] = f_bits(round_to_bf16_fast(f_mul(group[i], hadamard_factor(size))));
}
/* max|y|, as float bits, before the factor and the rounding. */
INLINE I hadamard_group_max(F *group, int size, const float *signs) {
    I largest = i_set(0);
    butterfly(group, size, signs);
    for (int i = 0; i < size; i++) largest = i_max(largest, magnitude_bits(group[i]));
    return largest;
}
#undef STAGE

/* Sixteen columns from `col` of sixteen rows, one column per vector; rounded to BF16 if a transform follows.
 * `inside`: the rows exist and are adjacent in memory. */
INLINE void load_columns(const Matrix *x, int64_t row, int64_t col, int wide, int inside, int hadamard, F *tile) {
    if (inside && col + 16 <= x->cols && x->stride_col == SCRATCH_STRIDE) { /* of a copy: offsets are constants */
        const char *from = (const char *)x->data + (row + col * SCRATCH_STRIDE) * (wide ? 4 : 2);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) tile[i] = load_floats(from, i * SCRATCH_STRIDE, wide);
    } else if (inside && col + 16 <= x->cols) { /* lane n is row + n */
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) tile[i] = load_floats(x->data, row + (col + i) * x->stride_col, wide);
    } else {
        float lanes[16][16];
        gather_columns(x, row, col, lanes);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) tile[i] = f_load(lanes[i]);
    }
    if (wide && hadamard)
        for (int i = 0; i < 16; i++) tile[i] = f_bits(round_to_bf16(tile[i]));
}
#endif
