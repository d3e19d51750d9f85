/* Philox4x32-10 (Salmon et al., SC 2011) for the random bits of stochastic rounding: sixteen bits per element.
 *
 * Element (r, c) uses the counter (c / 8, r, step * 8 + operand, layer), offsets added; its bits are half c % 2 of word
 * (c % 8) / 2. A word of a counter is in the low half of a 64-bit lane: the widening multiply gives hi and lo in one lane, and
 * it ignores upper halves, so they are cleared only after the last round.
 */
#ifndef FP4_PHILOX_H
#define FP4_PHILOX_H
#include "job.h"

typedef struct { Q w[4]; } Counters; /* eight counters */

/* Eight counters with equal first two words. */
typedef struct {
    uint32_t w0, w1;
    Q w2, w3;
} Half;

/* A round of four times eight counters: a single vector would wait for its multiplies. */
INLINE void philox_round(const Job *job, Counters *c, int round) {
    const Q m0 = q_set(multiplier0), m1 = q_set(multiplier1);
    const Q k0 = q_set(job->round_keys[round][0]), k1 = q_set(job->round_keys[round][1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const Q p0 = q_mul_low(c[i].w[0], m0), p1 = q_mul_low(c[i].w[2], m1);
        c[i].w[0] = q_xor3(q_upper(p1), c[i].w[1], k0);
        c[i].w[2] = q_xor3(q_upper(p0), c[i].w[3], k1);
        c[i].w[1] = p1;
        c[i].w[3] = p0;
    }
}

INLINE void philox_rounds(const Job *job, Counters *c, int round) {
    for (; round < ROUNDS; round++) philox_round(job, c, round);
}

/* A round from halves, which needs half the work. */
INLINE void philox_half_round(const Job *job, const Half *half, Counters *c, int round) {
    const Q m1 = q_set(multiplier1), none = q_set(0);
    for (int i = 0; i < 4; i++) {
        const uint64_t p0 = multiplier0 * half[i].w0;
        const Q p1 = q_mul_low(half[i].w2, m1);
        c[i].w[0] = q_xor3(q_upper(p1), q_set(half[i].w1 ^ job->round_keys[round][0]), none);
        c[i].w[1] = p1;
        c[i].w[2] = q_xor3(half[i].w3, q_set((p0 >> 32) ^ job->round_keys[round][1]), none);
        c[i].w[3] = q_set(p0);
    }
}

/* Rounds 0 and 1 of counters along a row, which differ only in the first word. */
INLINE void start_row(const Job *job, int64_t row, const Q *group, Counters *c) {
    const uint64_t p1 = multiplier1 * job->step_operand;
    const uint32_t w0 = (uint32_t)(p1 >> 32) ^ (uint32_t)((uint64_t)row + job->row_offset) ^ (uint32_t)job->round_keys[0][0];
    const Q key = q_set(job->layer ^ job->round_keys[0][1]);
    Half half[4];
    for (int i = 0; i < 4; i++) {
        const Q p0 = q_mul_low(q_add(group[i], q_set(job->col_offset8)), q_set(multiplier0));
        half[i] = (Half){w0, (uint32_t)p1, q_xor3(q_upper(p0), key, q_set(0)), p0};
    }
    philox_half_round(job, half, c, 1);
}

/* The same if a row of x is several rows of the tensor: the row is the number of the group divided by the groups per row. */
INLINE void start_rows(const Job *job, int64_t row, const Q *group, Counters *c) {
    const uint64_t groups = (uint64_t)job->own_cols / 8, p1 = multiplier1 * job->step_operand;
    const uint64_t first = (uint64_t)row * (uint64_t)(job->x.cols / job->own_cols) + job->row_offset;
    const Q inverse = q_set((1ull << 32) / groups + 1); /* exact while a row of x has less than 2^32 / groups groups */
    for (int i = 0; i < 4; i++) {
        const Q down = q_upper(q_mul_low(group[i], inverse));
        const Q along = q_add(q_add(group[i], q_set(job->col_offset8)), q_mul_low(down, q_set((uint32_t)-groups)));
        const Q p0 = q_mul_low(along, q_set(multiplier0));
        c[i].w[0] = q_xor3(q_add(down, q_set(first)), q_set((p1 >> 32) ^ job->round_keys[0][0]), q_set(0));
        c[i].w[1] = q_set(p1);
        c[i].w[2] = q_xor3(q_upper(p0), q_set(job->layer ^ job->round_keys[0][1]), q_set(0));
        c[i].w[3] = p0;
    }
    philox_round(job, c, 1);
}

/* Bits of the 256 elements that start at column `col` (a multiple of 8) of row `row`: rounds 0 and 1, and, after the others,
 * the result. */
INLINE void begin_row(const Job *job, int64_t row, int64_t col, Counters *c) {
    /* lane i = 2 L + k holds counter 4 k + L, where q_store_pairs writes it */
    static const uint64_t lane[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    Q group[4];
    for (int i = 0; i < 4; i++) group[i] = q_add(q_load(lane), q_set((uint64_t)(col / 8 + 8 * i)));
    if (job->own_cols) start_rows(job, row, group, c);
    else start_row(job, row, group, c);
}
INLINE void end_row(const Counters *c, uint16_t *bits) {
    for (int i = 0; i < 4; i++)
        q_store_pairs((uint8_t *)(bits + 64 * i), q_joined(c[i].w[0], c[i].w[1]), q_joined(c[i].w[2], c[i].w[3]));
}
INLINE void random_row_256(const Job *job, int64_t row, int64_t col, uint16_t *bits) {
    Counters c[4];
    begin_row(job, row, col, c);
    philox_rounds(job, c, 2);
    end_row(c, bits);
}

/* Bits of the eight columns from `col`, and of the eight that begin `apart` eights later, for sixteen rows, lane n being row + n:
 * column 2 i of them has the low half of the lanes of words[i], column 2 i + 1 the high half. */
INLINE void random_columns(const Job *job, int64_t row, int64_t col, int64_t apart, I *words) {
    static const uint64_t even[8] = {0, 2, 4, 6, 8, 10, 12, 14};
    const uint64_t p1 = multiplier1 * job->step_operand;
    Half half[4];
    Counters c[4];
    for (int i = 0; i < 4; i++) {
        /* round 0: counters differ only in the second word */
        const uint32_t group = (uint32_t)((uint64_t)(col / 8) + job->col_offset8) + (uint32_t)(i >> 1) * (uint32_t)apart;
        const uint64_t p0 = multiplier0 * group;
        const uint32_t w2 = (uint32_t)(p0 >> 32) ^ job->layer ^ (uint32_t)job->round_keys[0][1];
        const Q rows = q_add(q_load(even), q_set((uint64_t)row + job->row_offset + (uint64_t)(i & 1)));
        const Q w0 = q_xor3(rows, q_set((p1 >> 32) ^ job->round_keys[0][0]), q_set(0));
        /* round 1: only in the first word */
        const uint64_t q1 = multiplier1 * w2;
        const Q q0 = q_mul_low(w0, q_set(multiplier0));
        half[i] = (Half){(uint32_t)(q1 >> 32) ^ (uint32_t)p1 ^ (uint32_t)job->round_keys[1][0], (uint32_t)q1,
                         q_xor3(q_upper(q0), q_set((uint32_t)p0 ^ job->round_keys[1][1]), q_set(0)), q0};
    }
    philox_half_round(job, half, c, 2);
    philox_rounds(job, c, 3);
    for (int k = 0; k < 2; k++)
        for (int w = 0; w < 4; w++) words[4 * k + w] = i_interleave(c[2 * k].w[w], c[2 * k + 1].w[w]);
}
INLINE void random_columns_16(const Job *job, int64_t row, int64_t col, I *words) { random_columns(job, row, col, 1, words); }
#endif
