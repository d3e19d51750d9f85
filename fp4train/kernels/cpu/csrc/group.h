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
 * IF4 (scaling.choose_grids)            a block takes integers times 6/7 in place of E2M1 where their sum of error^2 is smaller
 * HiF4 (formats/levels.py)              each four columns of a block of 64 have a factor of their own
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
    Scale parts[CHUNK / 4]; /* HiF4: of each four columns; `stored` is that of the block */
} Group;

static const float if4_step = (float)(6.0 / 7.0), if4_inverse = (float)(1.0 / (6.0 / 7.0));

INLINE F scaled(F x, const Scale *scale) { return f_add(f_mul(x, scale->encode), f_set(0.0f)); }
INLINE F encode_factor(F scale, F decode) { return f_min(f_div(f_set(1.0f), f_mul(scale, decode)), f_set(float_max)); }

/* The sum over the rows of a block of what each lane has of it. */
INLINE F sum_of_rows(const Job *job, F total) {
    static const int32_t identity[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int32_t other = (int32_t)job->block_rows / 2; other; other /= 2)
        total = f_add(total, f_lanes(total, i_xor(i_load(identity), i_set(other))));
    return total;
}

/* The error of a block whose scale is `scale`, in each lane that of its block. */
INLINE F block_error(const Job *job, const F *x, F scale, F amax, Global global) {
    const F factor = encode_factor(scale, global.decode), range = f_set(job->bound);
    F total = f_set(0.0f);
    for (int64_t i = 0; i < job->block_cols; i++) {
        const F value = round_nearest_e2m1(f_mul(x[i], factor), 0).value;
        const F difference = f_sub(f_div(f_mul(f_mul(value, scale), amax), range), x[i]);
        const F error = job->formula == FOUR_OVER_SIX_MSE ? f_mul(difference, difference) : f_bits(magnitude_bits(difference));
        total = f_add(total, error); /* 0 + error: errors are not negative */
    }
    return sum_of_rows(job, total);
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

/* Whether the squared error of a block of IF4, as block_error has it, is smaller on the grid of integers than on that of E2M1; of
 * magnitudes, as signs change no error. */
INLINE K integers_are_nearer(const Job *job, const F *x, F scale, F amax, Global global) {
    const F factor = encode_factor(scale, global.decode), range = f_set(job->bound);
    F of_floats = f_set(0.0f), of_integers = f_set(0.0f);
    for (int64_t i = 0; i < job->block_cols; i++) {
        const F magnitude = f_bits(magnitude_bits(x[i])), t = f_mul(magnitude, factor);
        const F integer = f_mul(f_mul(nearest_integer(f_mul(t, f_set(if4_inverse))), scale), amax);
        const F left = f_sub(f_div(f_mul(f_mul(nearest_e2m1(t), scale), amax), range), magnitude);
        const F right = f_sub(f_div(f_mul(integer, f_set(if4_step)), range), magnitude);
        of_floats = f_add(of_floats, f_mul(left, left));
        of_integers = f_add(of_integers, f_mul(right, right));
    }
    return f_gt(sum_of_rows(job, of_floats), sum_of_rows(job, of_integers));
}

INLINE Scale integers_or_floats(const Job *job, const F *x, I largest, F amax, Global global) {
    Scale scale = scale_under(job, f_bits(largest), global, 0, E4M3);
    const K nearer = integers_are_nearer(job, x, scale.decode, amax, global);
    scale.stored = i_or(scale.stored, i_pick(nearer, i_set(0x80), i_set(0)));
    report(job, not_finite(largest));
    return scale;
}

/* HiF4: E6M2 of a block of 64, and the exponents of its eights and fours; in `parts` the factors of the fours. */
INLINE I levels_of(const Job *job, const F *x, Scale *parts) {
    I fours[16], all = i_set(0);
    for (int g = 0; g < 16; g++) {
        fours[g] = magnitude_bits(x[4 * g]);
        for (int i = 1; i < 4; i++) fours[g] = i_max(fours[g], magnitude_bits(x[4 * g + i]));
        all = i_max(all, fours[g]);
    }
    report(job, not_finite(all));
    I bits = i_bits(f_bits(round_to_bf16_fast(f_mul(f_bits(all), f_set(0x1.24p-3f))))); /* BF16(1/7) */
    bits = i_max(i_min(bits, i_set(0x47400000)), i_set(0x27800000));                    /* 49152, 2^-48 */
    bits = i_shr(i_add(i_add(bits, i_set(0xfffff)), i_and(i_shr(bits, 21), i_set(1))), 21);
    const F scale = f_bits(i_shl(bits, 21));
    const F inverse = f_bits(round_to_bf16_fast(f_div(f_set(1.0f), scale)));
    I stored = i_sub(bits, i_set((127 - 48) << 2));
    for (int i = 0; i < 8; i++) {
        const F largest = f_bits(i_max(fours[2 * i], fours[2 * i + 1]));
        const K first = f_gt(f_mul(largest, inverse), f_set(0x1.fffffep1f)); /* at least 4 */
        const F encode = f_pick(first, f_mul(inverse, f_set(0.5f)), inverse), decode = f_pick(first, f_add(scale, scale), scale);
        stored = i_or(stored, i_pick(first, i_set(1 << (8 + i)), i_set(0)));
        for (int g = 2 * i; g < 2 * i + 2; g++) {
            const K second = f_gt(f_mul(f_bits(fours[g]), encode), f_set(0x1.fffffep0f)); /* at least 2 */
            parts[g].encode = f_pick(second, f_mul(encode, f_set(0.5f)), encode);
            parts[g].decode = f_pick(second, f_add(decode, decode), decode);
            stored = i_or(stored, i_pick(second, i_set((int32_t)(1u << (16 + g))), i_set(0)));
        }
    }
    return stored;
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
    for (int64_t at = 0; job->hadamard && at < coded && col + at < job->x.cols; at += job->hadamard) hadamard_group(group->x + at, job->hadamard, signs);
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
    if (job->tiled) {
        const int64_t tile = band_of(row, job->amax_rows) * job->amax_stride + col / OUTER_COLUMNS;
        global = global_scale(job, f_set(job->amax[tile]));
    } else if (job->outer) {
        int32_t lanes[16];
        i_store(lanes, largest);
        for (int n = 0; job->outer_amax && n < 16 && row + n < job->x.rows; n++)
            memcpy(job->outer_amax + (row + n) * job->outer_stride + col / OUTER_COLUMNS, lanes + n, 4);
        global = global_scale(job, f_bits(largest));
    }
    for (int64_t b = 0; job->scale == SCALE_HIF4 && b < blocks; b++)
        group->scales[b].stored = levels_of(job, group->x + 64 * b, group->parts + 16 * b);
    if (job->scale == SCALE_HIF4) return;
    for (int64_t b = 0; job->scale == SCALE_IF4 && b < blocks; b++)
        group->scales[b] = integers_or_floats(job, group->x + b * block, maxima[b], given, global);
    if (job->scale == SCALE_IF4) return;
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
