/* RMSNorm and silu(gate) * up, forward and backward, in one pass each with the roundings and the order of additions of
 * torch's operators on CPUs (`quantize/produced_cpu.py`):
 *
 *   norm            x = bf16(h * rstd * w), rstd = 1 / sqrt(mean(h^2) + eps)
 *   norm_gradients  dh = bf16(dy w rstd + (-sum(dy w h) / 2 * rstd^3 / cols) * 2 h), and dy * (h * rstd) in float32, whose sum over
 *                   rows is dw
 *   gate            h = bf16(bf16(a / e) * up), e = 1 + exp(-a), a = gate
 *   gate_gradients  dgate = bf16(bf16(dh * up) * s * (1 + a (1 - s))), s = 1 / e, and dup = bf16(dh * bf16(a / e))
 *
 * Matrices are contiguous, with a multiple of 32 columns.
 */
#ifndef FP4_FUSED_H
#define FP4_FUSED_H
#include "input.h"

/* torch's sum of a row (ATen/native/cpu/SumKernel.cpp): four vectors of eight lanes side by side, whose totals of sixteen enter a
 * level above, and so on; then the four vectors in turn, and then the lanes. */
enum { SUM_LEVELS = 4, SUM_STEP = 32 };
typedef struct {
    F level[SUM_LEVELS][2];
} Sum;

INLINE Sum sum_zero(void) {
    Sum sum;
    for (int i = 0; i < SUM_LEVELS; i++) sum.level[i][0] = sum.level[i][1] = f_set(0.0f);
    return sum;
}

/* `count` steps were added to the lowest level. */
INLINE void sum_carry(Sum *sum, int64_t count) {
    if (count % 16) return;
    for (int i = 1; i < SUM_LEVELS; i++) {
        for (int n = 0; n < 2; n++) {
            sum->level[i][n] = f_add(sum->level[i][n], sum->level[i - 1][n]);
            sum->level[i - 1][n] = f_set(0.0f);
        }
        if (count & (int64_t)15 << 4 * i) return;
    }
}

INLINE float sum_total(Sum *sum) {
    float lanes[SUM_STEP], total = 0.0f;
    for (int i = 1; i < SUM_LEVELS; i++)
        for (int n = 0; n < 2; n++) sum->level[0][n] = f_add(sum->level[0][n], sum->level[i][n]);
    for (int n = 0; n < 2; n++) f_store(lanes + 16 * n, sum->level[0][n]);
    for (int i = 8; i < SUM_STEP; i++) lanes[i % 8] += lanes[i];
    for (int i = 0; i < 8; i++) total += lanes[i];
    return total;
}

/* Thirty-two BF16 neighbours as words: the even ones, the odd ones, and back, rounded. A NaN stays one: it has no bits in the lower
 * half, as no operation here gives it any. */
INLINE I words_at(const uint16_t *p, int64_t at) { return i_load((const int32_t *)(p + at)); }
INLINE F even_of(I words) { return f_bits(i_shl(words, 16)); }
INLINE F odd_of(I words) { return f_bits(i_and(words, i_set((int32_t)0xffff0000))); }
INLINE void store_pairs(uint16_t *p, int64_t at, F even, F odd) {
    i_store((int32_t *)(p + at), i_upper_halves(round_upper_half(even), round_upper_half(odd)));
}

static void FN(norm)(const Fused *job, int64_t row0, int64_t row1) {
    const uint16_t *const w = job->at[1];
    const F count = f_set((float)job->cols);
    for (int64_t row = row0; row < row1; row++) {
        const uint16_t *h = (const uint16_t *)job->at[0] + row * job->cols;
        uint16_t *x = (uint16_t *)job->at[2] + row * job->cols;
        Sum sum = sum_zero();
        for (int64_t i = 0; i < job->cols; i += SUM_STEP) {
            for (int n = 0; n < 2; n++) {
                const F a = load_floats(h, i + 16 * n, 0);
                sum.level[0][n] = f_add(sum.level[0][n], f_mul(a, a));
            }
            sum_carry(&sum, i / SUM_STEP + 1);
        }
        const F mean = f_add(f_div(f_set(sum_total(&sum)), count), f_set(job->eps));
        const F rstd = f_div(f_set(1.0f), f_sqrt(mean));
        float lanes[16];
        f_store(lanes, rstd);
        ((float *)job->at[3])[row] = lanes[0];
        for (int64_t i = 0; i < job->cols; i += 32) {
            const I a = words_at(h, i), b = words_at(w, i);
            store_pairs(x, i, f_mul(f_mul(even_of(a), rstd), even_of(b)), f_mul(f_mul(odd_of(a), rstd), odd_of(b)));
        }
    }
}

static void FN(norm_gradients)(const Fused *job, int64_t row0, int64_t row1) {
    const uint16_t *const w = job->at[2];
    const float *const factors = job->at[3];
    for (int64_t row = row0; row < row1; row++) {
        const uint16_t *dy = (const uint16_t *)job->at[0] + row * job->cols, *h = (const uint16_t *)job->at[1] + row * job->cols;
        uint16_t *dh = (uint16_t *)job->at[4] + row * job->cols;
        float *products = (float *)job->at[5] + row * job->cols;
        const F rstd = f_set(factors[row]);
        Sum sum = sum_zero();
        for (int64_t i = 0; i < job->cols; i += SUM_STEP) {
            for (int n = 0; n < 2; n++) {
                const F d = load_floats(dy, i + 16 * n, 0), a = load_floats(h, i + 16 * n, 0);
                const F b = load_floats(w, i + 16 * n, 0);
                sum.level[0][n] = f_add(sum.level[0][n], f_mul(f_mul(d, b), a));
                f_store(products + i + 16 * n, f_mul(d, f_mul(a, rstd)));
            }
            sum_carry(&sum, i / SUM_STEP + 1);
        }
        const float r = factors[row];
        const F share = f_set(-0.5f * sum_total(&sum) * (r * r * r) / (float)job->cols), two = f_set(2.0f);
        for (int64_t i = 0; i < job->cols; i += 32) {
            const I d = words_at(dy, i), a = words_at(h, i), b = words_at(w, i);
            const F even = f_add(f_mul(f_mul(even_of(d), even_of(b)), rstd), f_mul(share, f_mul(two, even_of(a))));
            const F odd = f_add(f_mul(f_mul(odd_of(d), odd_of(b)), rstd), f_mul(share, f_mul(two, odd_of(a))));
            store_pairs(dh, i, even, odd);
        }
    }
}

/* 1 + exp(-a): the bits of Sleef's expf_u10 (sleefsimdsp.c xexpf) where they matter beside the one. */
INLINE F one_and_exp(F a) {
    const F magic = f_set(12582912.0f); /* 1.5 * 2^23: to the nearest integer, ties to even */
    const F x = f_min(f_sub(f_set(0.0f), f_min(a, f_set(80.0f))), f_set(89.0f));
    const F shifted = f_add(f_mul(x, f_set(1.442695040888963407359924681001892137426645954152985934135449406931f)), magic);
    const F k = f_sub(shifted, magic);
    const F s = f_fma(k, f_set(-1.428606765330187045e-06f), f_fma(k, f_set(-0.693145751953125f), x));
    F u = f_set(0.000198527617612853646278381f);
    u = f_fma(u, s, f_set(0.00139304355252534151077271f));
    u = f_fma(u, s, f_set(0.00833336077630519866943359f));
    u = f_fma(u, s, f_set(0.0416664853692054748535156f));
    u = f_fma(u, s, f_set(0.166666671633720397949219f));
    u = f_fma(u, s, f_set(0.5f));
    u = f_add(f_set(1.0f), f_fma(f_mul(s, s), u, s));
    const F half = f_bits(i_add(i_shl(i_bits(shifted), 23), i_set(126 << 23))); /* 2^(k - 1) */
    return f_fma(f_mul(u, half), f_set(2.0f), f_set(1.0f));
}

INLINE F bf16_grid(F x) { return f_bits(round_to_bf16_fast(x)); }
INLINE F gated(F a, F up) { return f_mul(bf16_grid(f_div(a, one_and_exp(a))), up); }

static void FN(gate)(const Fused *job, int64_t row0, int64_t row1) {
    const int64_t begin = row0 * job->cols, end = row1 * job->cols;
    const uint16_t *gate = job->at[0], *up = job->at[1];
    uint16_t *h = job->at[2];
    for (int64_t i = begin; i < end; i += 32) {
        const I a = words_at(gate, i), b = words_at(up, i);
        store_pairs(h, i, gated(even_of(a), even_of(b)), gated(odd_of(a), odd_of(b)));
    }
}

typedef struct {
    F gate, up;
} Gradients;
INLINE Gradients gradients_of(F d, F a, F up) {
    const F one = f_set(1.0f), e = one_and_exp(a), s = f_div(one, e);
    const F slope = f_add(one, f_mul(a, f_sub(one, s)));
    return (Gradients){f_mul(f_mul(bf16_grid(f_mul(d, up)), s), slope), f_mul(d, bf16_grid(f_div(a, e)))};
}
static void FN(gate_gradients)(const Fused *job, int64_t row0, int64_t row1) {
    const int64_t begin = row0 * job->cols, end = row1 * job->cols;
    const uint16_t *dh = job->at[0], *gate = job->at[1], *up = job->at[2];
    for (int64_t i = begin; i < end; i += 32) {
        const I d = words_at(dh, i), a = words_at(gate, i), b = words_at(up, i);
        const Gradients even = gradients_of(even_of(d), even_of(a), even_of(b)), odd = gradients_of(odd_of(d), odd_of(a), odd_of(b));
        store_pairs(job->at[3], i, even.gate, odd.gate);
        store_pairs(job->at[4], i, even.up, odd.up);
    }
}

static void FN(fused)(const Fused *job, int64_t row0, int64_t row1) {
    switch (job->kind) {
    case FUSED_NORM: FN(norm)(job, row0, row1); break;
    case FUSED_NORM_GRADIENTS: FN(norm_gradients)(job, row0, row1); break;
    case FUSED_GATE: FN(gate)(job, row0, row1); break;
    default: FN(gate_gradients)(job, row0, row1);
    }
}
#endif
