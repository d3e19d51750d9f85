/* Groups: 128 columns of sixteen rows that are loaded before the first of their blocks is rounded. A lane is a row, a vector is a
 * column, as in colwise.h.
 *
 * For what no block knows by itself: transforms of up to 128 columns, the scale of an outer block, and
 *
 * four over six (scaling.choose_scales)  the scale of a block is E4M3(s) or E4M3(1.5 s), s = (amax_b / 6) S_enc, whichever
 *                                        has the smaller sum of |error| or error^2; equal sums take the first
 * MS-EDEN (rounding.corrected_scales)    the scales of the blocks of a transform are multiplied by <t, t> / <t, q> and
 *                                        rounded stochastically to E4M3
 *
 * Sums add the columns of a block in sequence, then the rows of a block as a tree, then the blocks of a transform in sequence.
 */
#ifndef FP4_GROUP_H
#define FP4_GROUP_H
#include "hadamard.h"
#include "strip.h"

enum { CHUNK = TILE_COLUMNS };
_Static_assert((int)CHUNK == (int)OUTER_COLUMNS && (int)CHUNK == (int)MAX_HADAMARD, "a chunk is an outer block, and whole transforms");

typedef struct {
    F x[CHUNK];
    Scale scales[CHUNK / 16];
} Group;

INLINE F scaled(F x, const Scale *scale) { return f_add(f_mul(x, scale->encode), f_set(0.0f)); }
INLINE F encode_factor(F scale, F decode) { return f_min(f_div(f_set(1.0f), f_mul(scale, decode)), f_set(float_max)); }

/* The error of a block whose scale is `scale`, in each lane that of its block. */
INLINE F block_error(const Job *job, const F *x, F scale, F amax, Global global) {
    static const int32_t identity[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F factor = encode_factor(scale, global.decode), range = f_set(job->bound);
    F total = f_set(0.0f);
    for (int64_t i = 0; i < job->block_cols; i++) {
        const F value = round_nearest_e2m1(f_mul(x[i], factor), 0).value;
        const F difference = f_sub(f_div(f_mul(f_mul(value, scale), amax), range), x[i]);
        const F error = job->formula == FOUR_OVER_SIX_MSE ? f_mul(difference, difference) : f_bits(magnitude_bits(difference));
        total = f_add(total, error); /* 0 + error: errors are not negative */
    }
    for (int32_t other = (int32_t)job->block_rows / 2; other; other /= 2)
        total = f_add(total, f_lanes(total, i_xor(i_load(identity), i_set(other))));
    return total;
}

INLINE Scale four_over_six(const Job *job, const F *x, I largest, F amax, Global global) {
    const Element e4m3 = element_of(E4M3);
    const F base = f_mul(f_div(f_bits(largest), f_set(job->largest)), global.encode);
    const Rounded six = round_nearest(base, e4m3), four = round_nearest(f_mul(base, f_set(1.5f)), e4m3);
    const K better = f_gt(block_error(job, x, six.value, amax, global), block_error(job, x, four.value, amax, global));
    const F value = f_pick(better, four.value, six.value);
    report(job, not_finite(largest));
    return (Scale){i_pick(better, four.code, six.code), encode_factor(value, global.decode), value};
}

/* Correct the scales of `blocks` blocks, which one transform turned. `random`: those of the first element of each. */
INLINE void correct_scales(const Job *job, const F *x, Scale *scales, int64_t blocks, const I *random) {
    F energy = f_set(0.0f), overlap = f_set(0.0f);
    for (int64_t b = 0; b < blocks; b++, x += job->block_cols) {
        const F weight = f_mul(scales[b].decode, scales[b].decode);
        F squares = f_set(0.0f), products = f_set(0.0f);
        scales[b].encode = f_pick(i_eq(i_bits(scales[b].decode), i_set(0)), f_set(0.0f), scales[b].encode);
        for (int64_t i = 0; i < job->block_cols; i++) {
            const F t = scaled(x[i], &scales[b]);
            squares = f_add(squares, f_mul(t, t));
            products = f_add(products, f_mul(t, round_nearest_e2m1(t, 0).value));
        }
        energy = f_add(energy, f_mul(squares, weight));
        overlap = f_add(overlap, f_mul(products, weight));
    }
    const F factor = f_pick(i_eq(magnitude_bits(overlap), i_set(0)), f_set(1.0f), f_div(energy, overlap));
    for (int64_t b = 0; b < blocks; b++) {
        const Rounded s = round_stochastic(f_mul(scales[b].decode, factor), random[b], element_of(E4M3));
        scales[b].stored = s.code;
        scales[b].decode = s.value;
    }
}

/* Load and transform `coded` columns. Returns the largest magnitude of each lane, and in `maxima` that of each block. */
INLINE I load_group(const Job *job, int64_t row, int64_t col, int64_t coded, int wide, int inside, const float *signs, Group *group,
                    I *maxima) {
    I all = i_set(0);
    for (int64_t at = 0; at < coded; at += 16) load_columns(&job->x, row, col + at, wide, inside, job->hadamard, group->x + at);
    for (int64_t at = 0; job->hadamard && at < coded; at += job->hadamard) hadamard_group(group->x + at, job->hadamard, signs);
    for (int64_t b = 0; b * job->block_cols < coded; b++) {
        const F *x = group->x + b * job->block_cols;
        maxima[b] = i_set(0);
        for (int64_t i = 0; i < job->block_cols; i++) maxima[b] = i_max(maxima[b], magnitude_bits(x[i]));
        if (job->block_rows > 1) maxima[b] = i_group_max(maxima[b], job->block_rows);
        all = i_max(all, maxima[b]);
    }
    return all;
}

/* A group with the scales of its blocks. `given`: the amax of the tensor, or of each lane's row; `global`: its scale. */
INLINE void scale_group(const Job *job, int64_t row, int64_t col, int64_t coded, F given, Global global, int wide, int inside,
                        const float *signs, Group *group) {
    const int64_t block = job->block_cols, blocks = whole_blocks(coded, block);
    I maxima[CHUNK / 16], random[CHUNK / 16];
    const I largest = load_group(job, row, col, coded, wide, inside, signs, group, maxima);
    if (job->outer) {
        int32_t lanes[16];
        i_store(lanes, largest);
        for (int n = 0; job->outer_amax && n < 16 && row + n < job->x.rows; n++)
            memcpy(job->outer_amax + (row + n) * job->outer_stride + col / OUTER_COLUMNS, lanes + n, 4);
        global = global_scale(job, f_bits(largest));
    }
    for (int64_t b = 0; b < blocks; b++)
        group->scales[b] = is_four_over_six(job) ? four_over_six(job, group->x + b * block, maxima[b], given, global)
                                                 : block_scale(job, maxima[b], global, job->outer);
    if (!job->eden) return;
    for (int64_t b = 0; b < blocks; b += 2) {
        I words[8];
        random_columns(job, row, col + b * block, block / 8, words);
        random[b] = random_low(words[0]);
        if (b + 1 < blocks) random[b + 1] = random_low(words[4]);
    }
    const int64_t turned = job->hadamard / block;
    for (int64_t b = 0; b < blocks; b += turned) correct_scales(job, group->x + b * block, group->scales + b, turned, random + b);
}
#endif
