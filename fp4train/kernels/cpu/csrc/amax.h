/* The largest magnitude of the tensor or of each row, as float bits. The bits compare as integers in the same order as the
 * magnitudes. NaN is larger than infinity, so it propagates without a test. */
#ifndef FP4_AMAX_H
#define FP4_AMAX_H
#include "hadamard.h"

INLINE void raise_to(uint32_t *amax, uint32_t value) {
    uint32_t old = __atomic_load_n(amax, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(amax, &old, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

INLINE uint32_t *amax_at(const AmaxJob *job, int64_t row, int64_t col) {
    return job->amax + band_of(row, job->amax_rows) * job->amax_stride + (job->tiled ? col / OUTER_COLUMNS : 0);
}

INLINE uint32_t largest_lane(I x) {
    int32_t lanes[16], largest = 0;
    i_store(lanes, x);
    for (int i = 0; i < 16; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return (uint32_t)largest;
}

/* Prefetch by two lines in addition to the hardware prefetcher: 1.1 (two threads) to 1.7 times (one) as fast for large BF16
 * tensors. Distances from 512 bytes on gain less. */
enum { FETCH_AHEAD = 128 };

/* Tile by tile; col0 is the first column of one. */
INLINE void amax_tiles_with(const AmaxJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int wide) {
    uint8_t stage[4 * OUTER_COLUMNS];
    for (int64_t col = col0; col < col1; col += OUTER_COLUMNS) {
        I all = i_set(0);
        for (int64_t row = row0; row < row1; row++) {
            const void *x = row_of(&job->x, row, col, OUTER_COLUMNS, wide, stage);
            for (int i = 0; i < OUTER_COLUMNS; i += 16) all = i_max(all, magnitude_bits(load_floats(x, i, wide)));
            if (row + 1 < row1 && (row + 1) % job->amax_rows) continue;
            raise_to(amax_at(job, row, col), largest_lane(all));
            all = i_set(0);
        }
    }
}

INLINE void amax_rows_with(const AmaxJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int wide) {
    uint8_t stage[4 * 256];
    I all = i_set(0);
    for (int64_t row = row0; row < row1; row++) {
        for (int64_t col = col0; col < col1; col += 256) {
            const void *x = row_of(&job->x, row, col, 256, wide, stage);
            for (int i = 0; i < (wide ? 1024 : 512); i += 64)
                __builtin_prefetch((const void *)((uintptr_t)x + FETCH_AHEAD + (uintptr_t)i), 0, 3);
            I a = i_set(0), b = i_set(0); /* two independent chains */
            if (wide) {
                for (int i = 0; i < 256; i += 32) {
                    a = i_max(a, magnitude_bits(load_floats(x, i, 1)));
                    b = i_max(b, magnitude_bits(load_floats(x, i + 16, 1)));
                }
                all = i_max(all, i_max(a, b));
            } else {
                all = i_max(all, i_row_max_bf16(x));
            }
        }
        if (job->amax_stride) {
            raise_to(amax_at(job, row, 0), largest_lane(all));
            all = i_set(0);
        }
    }
    if (!job->amax_stride) raise_to(job->amax, largest_lane(all));
}

static void FN(amax_rows)(const AmaxJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
    if (job->tiled) return amax_tiles_with(job, row0, row1, col0, col1, job->x.input != INPUT_BF16);
    if (job->x.input == INPUT_BF16) amax_rows_with(job, row0, row1, col0, col1, 0);
    else amax_rows_with(job, row0, row1, col0, col1, 1);
}

INLINE I hadamard_amax(I largest, int size) { return round_to_bf16(f_mul(f_bits(largest), hadamard_factor(size))); }

/* Transform up to TILE_COLUMNS columns of sixteen rows, write them as rows of BF16, and return the maxima as float bits. */
INLINE I transform_columns(const AmaxJob *job, const Matrix *x, int64_t row, int64_t col0, int64_t col1, int wide, int inside,
                           const Signs *signs) {
    uint8_t rows[16][2 * TILE_COLUMNS] __attribute__((aligned(64)));
    I all = i_set(0); /* of two columns, as unsigned 16-bit integers */
    for (int64_t col = col0; col < col1; col += 16) {
        F tile[16];
        I words[8];
        load_columns(x, row, col, wide, inside, 1, tile);
        hadamard_16_sums(tile, signs);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const F even = f_mul(tile[2 * i], hadamard_factor(16)), odd = f_mul(tile[2 * i + 1], hadamard_factor(16));
            words[i] = i_upper_halves(round_upper_half(even), round_upper_half(odd));
            all = i_max_u16(all, i_and(words[i], i_set(0x7fff7fff)));
        }
        i_store_columns(words, 8, rows[0] + 2 * (col - col0), sizeof rows[0]);
    }
    if (col1 - col0 == TILE_COLUMNS && row + 16 <= job->x.rows) {
        uint16_t *to = job->transformed + row * job->transformed_stride + col0;
        for (int n = 0; n < 16; n++, to += job->transformed_stride)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) i_store((int32_t *)to + 16 * i, i_load((const int32_t *)rows[n] + 16 * i));
        return i_max(i_shl(all, 16), i_and(all, i_set(0x7fff0000)));
    }
    for (int64_t n = 0; n < 16 && row + n < job->x.rows; n++)
        copy_bytes(job->transformed + (row + n) * job->transformed_stride + col0, rows[n], (col1 - col0 + 15) / 16 * 32);
    return i_max(i_shl(all, 16), i_and(all, i_set(0x7fff0000)));
}

INLINE void amax_columns_with(const AmaxJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead,
                              int wide) {
    I all = i_set(0), plain = i_set(0);
    uint8_t scratch[4 * SCRATCH_STRIDE * TILE_COLUMNS] __attribute__((aligned(64)));
    const Matrix x = compact(&job->x, row0, row1, col0, col1, wide, scratch, &plain);
    const Signs signs = signs_of(job->signs[0]);
    const int scales_amax = job->hadamard && !job->transformed; /* the maxima are those before factor and rounding */
    float group_signs[MAX_HADAMARD];
    if (job->hadamard > 16) signs_of_group(job->signs, job->hadamard, group_signs);
    for (int64_t row = row0; row < row1; row += 16) {
        const int inside = columns_inside(&job->x, row);
        prefetch_ahead(&job->x, row0, row1, col0, col1, wide, ahead, (row - row0) / 16, (row1 - row0 + 15) / 16);
        for (int64_t col = col0; job->hadamard > 16 && col < col1; col += job->hadamard) {
            F group[MAX_HADAMARD];
            for (int i = 0; i < job->hadamard; i += 16) load_columns(&x, row, col + i, wide, inside, 1, group + i);
            all = i_max(all, hadamard_group_max(group, job->hadamard, group_signs));
        }
        if (job->transformed) all = i_max(all, transform_columns(job, &x, row, col0, col1, wide, inside, &signs));
        for (int64_t col = col0; !job->transformed && job->hadamard <= 16 && col < col1; col += 16) {
            F tile[16];
            load_columns(&x, row, col, wide, inside, job->hadamard, tile);
            if (job->hadamard) {
                all = i_max(all, hadamard_16_max(tile, &signs));
            } else {
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) all = i_max(all, magnitude_bits(tile[i]));
            }
        }
        const I largest = scales_amax ? hadamard_amax(all, job->hadamard) : all;
        if (job->tiled) { /* a rectangle is no wider than a tile, and sixteen rows are of one */
            raise_to(amax_at(job, row, col0), largest_lane(largest));
            all = i_set(0);
        } else if (job->amax_stride) {
            int32_t lanes[16];
            i_store(lanes, largest);
            for (int n = 0; n < 16 && row + n < job->x.rows; n++) raise_to(amax_at(job, row + n, 0), (uint32_t)lanes[n]);
            all = i_set(0);
        }
    }
    if (job->plain) raise_to(job->plain, largest_lane(plain));
    if (!job->amax_stride) raise_to(job->amax, largest_lane(scales_amax ? hadamard_amax(all, job->hadamard) : all));
}

static void FN(amax_columns)(const AmaxJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead) {
    if (job->x.input == INPUT_BF16) amax_columns_with(job, row0, row1, col0, col1, ahead, 0);
    else amax_columns_with(job, row0, row1, col0, col1, ahead, 1);
}
#endif
