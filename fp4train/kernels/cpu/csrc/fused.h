/* RMSNorm, silu(gate) * up and rotary positions, forward and backward, in one pass each with the roundings and the order of additions
 * of torch's operators on CPUs (`models/common/on_cpu.py`); r rounds to BF16, or where tensors are float32 nothing:
 *
 *   norm                x = r(h * rstd * w), rstd = 1 / sqrt(mean(h^2) + eps)
 *   norm_gradients      dh = r(dy w rstd + (-sum(dy w h) / 2 * rstd^3 / cols) * 2 h), and dy * (h * rstd) in float32, whose sum over
 *                       rows is dw
 *   gate                h = r(r(a / e) * up), e = 1 + exp(-a), a = gate
 *   gate_gradients      dgate = r(r(dh * up) * s * (1 + a (1 - s))), s = 1 / e, and dup = r(dh * r(a / e))
 *   rotation            y1 = r(r(x1 c1) - r(x2 s1)), y2 = r(r(x2 c2) + r(x1 s2)) of both halves of a head
 *   rotation_gradients  dx1 = r(r(dy1 c1) + r(dy2 s2)), dx2 = r(r(dy2 c2) - r(dy1 s1))
 *
 * Matrices are contiguous, with a multiple of 32 columns, of 64 where they are heads. Those of a norm are BF16. `wide`: those of the
 * others are float32; a constant in each function that takes it.
 *
 * Bytes per element of BF16, from memory and to it: norm 4, norm_gradients 10 (6 and the products), gate 6, gate_gradients 10,
 * rotations 4; the least but for the products. A row's second reading is from the cache.
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

/* Thirty-two neighbours: of BF16 the even ones and the odd ones, of float32 the first sixteen and the others; and back, rounded. A NaN
 * in BF16 stays one: it has no bits in the lower half, as no operation here gives it any. */
typedef struct {
    F a, b;
} Pair;
INLINE Pair pair_at(const void *p, int64_t at, int wide) {
    if (wide) return (Pair){load_floats(p, at, 1), load_floats(p, at + 16, 1)};
    const I words = i_load((const int32_t *)((const uint16_t *)p + at));
    return (Pair){f_bits(i_shl(words, 16)), f_bits(i_and(words, i_set((int32_t)0xffff0000)))};
}
INLINE void store_pair(void *p, int64_t at, Pair x, int wide) {
    if (wide) {
        f_store((float *)p + at, x.a);
        f_store((float *)p + at + 16, x.b);
    } else {
        i_store((int32_t *)((uint16_t *)p + at), i_upper_halves(round_upper_half(x.a), round_upper_half(x.b)));
    }
}
INLINE F rounded(F x, int wide) { return wide ? x : f_bits(round_to_bf16_fast(x)); }
INLINE void *row_at(const Fused *job, int tensor, int64_t row, int wide) {
    return (char *)job->at[tensor] + row * job->cols * (wide ? 4 : 2);
}

INLINE void norm(const Fused *job, int64_t row0, int64_t row1) {
    const void *const w = job->at[1];
    const F count = f_set((float)job->cols);
    for (int64_t row = row0; row < row1; row++) {
        const void *const h = row_at(job, 0, row, 0);
        void *const x = row_at(job, 2, row, 0);
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
            const Pair a = pair_at(h, i, 0), b = pair_at(w, i, 0);
            store_pair(x, i, (Pair){f_mul(f_mul(a.a, rstd), b.a), f_mul(f_mul(a.b, rstd), b.b)}, 0);
        }
    }
}

INLINE void norm_gradients(const Fused *job, int64_t row0, int64_t row1) {
    const void *const w = job->at[2];
    const float *const factors = job->at[3];
    for (int64_t row = row0; row < row1; row++) {
        const void *const dy = row_at(job, 0, row, 0), *const h = row_at(job, 1, row, 0);
        void *const dh = row_at(job, 4, row, 0);
        float *const products = row_at(job, 5, row, 1);
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
            const Pair d = pair_at(dy, i, 0), a = pair_at(h, i, 0), b = pair_at(w, i, 0);
            const F first = f_add(f_mul(f_mul(d.a, b.a), rstd), f_mul(share, f_mul(two, a.a)));
            const F second = f_add(f_mul(f_mul(d.b, b.b), rstd), f_mul(share, f_mul(two, a.b)));
            store_pair(dh, i, (Pair){first, second}, 0);
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

INLINE F gated(F a, F up, int wide) { return f_mul(rounded(f_div(a, one_and_exp(a)), wide), up); }

INLINE void gate(const Fused *job, int64_t row0, int64_t row1, int wide) {
    for (int64_t i = row0 * job->cols; i < row1 * job->cols; i += 32) {
        const Pair a = pair_at(job->at[0], i, wide), up = pair_at(job->at[1], i, wide);
        store_pair(job->at[2], i, (Pair){gated(a.a, up.a, wide), gated(a.b, up.b, wide)}, wide);
    }
}

typedef struct {
    F gate, up;
} Gradients;
INLINE Gradients gradients_of(F d, F a, F up, int wide) {
    const F one = f_set(1.0f), e = one_and_exp(a), s = f_div(one, e);
    const F rest = f_sub(one, s), slope = wide ? f_fma(a, rest, one) : f_add(one, f_mul(a, rest)); /* torch's build contracts this in float32 alone */
    return (Gradients){f_mul(f_mul(rounded(f_mul(d, up), wide), s), slope), f_mul(d, rounded(f_div(a, e), wide))};
}
INLINE void gate_gradients(const Fused *job, int64_t row0, int64_t row1, int wide) {
    for (int64_t i = row0 * job->cols; i < row1 * job->cols; i += 32) {
        const Pair d = pair_at(job->at[0], i, wide), a = pair_at(job->at[1], i, wide), up = pair_at(job->at[2], i, wide);
        const Gradients x = gradients_of(d.a, a.a, up.a, wide), y = gradients_of(d.b, a.b, up.b, wide);
        store_pair(job->at[3], i, (Pair){x.gate, y.gate}, wide);
        store_pair(job->at[4], i, (Pair){x.up, y.up}, wide);
    }
}

/* r(r(x a) + r(y b)), or their difference */
INLINE F rotated_half(F x, F a, F y, F b, int minus, int wide) {
    const F first = rounded(f_mul(x, a), wide), second = rounded(f_mul(y, b), wide);
    return minus ? f_sub(first, second) : f_add(first, second);
}

/* A row is a head of a token: at[0] and at[3]; cosines and sines of the `time` positions: at[1] and at[2]. */
INLINE void rotation(const Fused *job, int64_t row0, int64_t row1, int wide, int back) {
    const int64_t half = job->cols / 2;
    for (int64_t row = row0; row < row1; row++) {
        const int64_t position = row / job->heads % job->time;
        const void *const x = row_at(job, 0, row, wide), *const cosine = row_at(job, 1, position, wide), *const sine = row_at(job, 2, position, wide);
        void *const y = row_at(job, 3, row, wide);
        for (int64_t i = 0; i < half; i += 32) {
            const Pair x1 = pair_at(x, i, wide), x2 = pair_at(x, half + i, wide), c1 = pair_at(cosine, i, wide), c2 = pair_at(cosine, half + i, wide);
            const Pair sines[2] = {pair_at(sine, i, wide), pair_at(sine, half + i, wide)}, s1 = sines[back], s2 = sines[!back];
            store_pair(y, i, (Pair){rotated_half(x1.a, c1.a, x2.a, s1.a, !back, wide), rotated_half(x1.b, c1.b, x2.b, s1.b, !back, wide)}, wide);
            store_pair(y, half + i, (Pair){rotated_half(x2.a, c2.a, x1.a, s2.a, back, wide), rotated_half(x2.b, c2.b, x1.b, s2.b, back, wide)}, wide);
        }
    }
}

INLINE void fused_rows(const Fused *job, int64_t row0, int64_t row1, int wide) {
    switch (job->kind) {
    case FUSED_NORM: norm(job, row0, row1); break;
    case FUSED_NORM_GRADIENTS: norm_gradients(job, row0, row1); break;
    case FUSED_GATE: gate(job, row0, row1, wide); break;
    case FUSED_GATE_GRADIENTS: gate_gradients(job, row0, row1, wide); break;
    case FUSED_ROTATION: rotation(job, row0, row1, wide, 0); break;
    default: rotation(job, row0, row1, wide, 1);
    }
}

static void FN(fused)(const Fused *job, int64_t row0, int64_t row1) {
    if (job->wide) fused_rows(job, row0, row1, 1);
    else fused_rows(job, row0, row1, 0);
}
#endif
