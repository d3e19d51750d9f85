/* Reading x: float32 vectors from BF16, FP16 or float32, and copies of rows that a kernel cannot read in place.
 *
 * A staged copy is zero-padded, which pads incomplete blocks; FP16 is staged as float32.
 */
#ifndef FP4_INPUT_H
#define FP4_INPUT_H
#include "job.h"

/* n / block, which is a power of two. A division takes as long as rounding two vectors. */
INLINE int64_t whole_blocks(int64_t n, int64_t block) { return n >> __builtin_ctzll((unsigned long long)block); }
/* The band of `rows` rows that a row belongs to. */
INLINE int64_t band_of(int64_t row, int64_t rows) { return rows == 1 ? row : row / rows; }

INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
    float value;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    memcpy(&value, &bits, 4);
    if (exponent == 0) value = (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    return value;
}

INLINE float element_at(const Matrix *x, int64_t row, int64_t col) {
    const int64_t at = row * x->stride_row + col * x->stride_col;
    uint32_t bits;
    float value;
    if (x->input == INPUT_F32) return ((const float *)x->data)[at];
    if (x->input == INPUT_F16) return half_to_float(((const uint16_t *)x->data)[at]);
    bits = (uint32_t)((const uint16_t *)x->data)[at] << 16;
    memcpy(&value, &bits, 4);
    return value;
}

/* Sixteen adjacent elements as float32. */
INLINE F load_floats(const void *p, int64_t at, int wide) {
    if (wide) return f_load((const float *)p + at);
    return f_bits(i_shl(i_load_u16((const uint16_t *)p + at), 16));
}

/* The rare cases outside the fast paths below are not inlined: they would be most of the code. */
#define NOINLINE static __attribute__((noinline))

NOINLINE void stage_row(const Matrix *x, int64_t row, int64_t col, int64_t width, int wide, void *stage) {
    const int64_t size = wide ? 4 : 2;
    if (x->stride_col == 1 && x->input != INPUT_F16) {
        memset(stage, 0, (size_t)(width * size));
        if (col < x->cols)
            memcpy(stage, (const char *)x->data + (row * x->stride_row + col) * size, (size_t)((x->cols - col) * size));
        return;
    }
    for (int64_t i = 0; i < width; i++) {
        const float value = col + i < x->cols ? element_at(x, row, col + i) : 0.0f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (wide) ((float *)stage)[i] = value;
        else ((uint16_t *)stage)[i] = (uint16_t)(bits >> 16);
    }
}

/* `width` elements of a row from column `col`: in place, or copied to `stage` (which holds width elements of four bytes).
 * They are float32 if `wide`, else BF16. */
INLINE const void *row_of(const Matrix *x, int64_t row, int64_t col, int64_t width, int wide, void *stage) {
    if (x->stride_col == 1 && x->input != INPUT_F16 && col + width <= x->cols)
        return (const char *)x->data + (row * x->stride_row + col) * (wide ? 4 : 2);
    stage_row(x, row, col, width, wide, stage);
    return stage;
}

/* Columns col.. of sixteen rows whose columns are adjacent in memory. */
INLINE void transpose_rows(const Matrix *x, int64_t row, int64_t col, float lanes[16][16]) {
    I rows[16];
    for (int n = 0; n < 16; n++)
        rows[n] = i_bits(load_floats(x->data, (row + n) * x->stride_row + col, x->input != INPUT_BF16));
    i_store_columns(rows, 8, (uint8_t *)lanes[0], sizeof lanes[0]);
    i_store_columns(rows + 8, 8, (uint8_t *)(lanes[0] + 8), sizeof lanes[0]);
}

/* Columns col.. of sixteen rows, if some do not exist or the rows are not adjacent in memory: then one by one, or transposed. */
NOINLINE void gather_columns(const Matrix *x, int64_t row, int64_t col, float lanes[16][16]) {
    if (x->stride_col == 1 && x->input != INPUT_F16 && row + 16 <= x->rows && col + 16 <= x->cols) {
        transpose_rows(x, row, col, lanes);
        return;
    }
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < 16; n++)
            lanes[i][n] = row + n < x->rows && col + i < x->cols ? element_at(x, row + n, col + i) : 0.0f;
}
INLINE int columns_inside(const Matrix *x, int64_t row) {
    return x->stride_row == 1 && x->input != INPUT_F16 && row + 16 <= x->rows;
}

NOINLINE void copy_rest(void *to, const void *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }

/* The larger magnitudes, as bits, of BF16 or float32. */
INLINE I larger_magnitudes(I largest, I x, int wide) {
    return wide ? i_max(largest, i_and(x, i_set(INT32_MAX))) : i_max_u16(largest, i_and(x, i_set(0x7fff7fff)));
}

/* memcpy of whole lines of 64 bytes; the call that the compiler makes for an unknown size has a slow start. Returns the larger of
 * `largest` and the magnitudes that it copies. */
INLINE I copy_bytes_max(void *to, const void *from, int64_t bytes, I largest, int wide) {
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        const I x = i_load((const int32_t *)((const char *)from + i));
        i_store((int32_t *)((char *)to + i), x);
        largest = larger_magnitudes(largest, x, wide);
    }
    if (i < bytes) {
        int32_t rest[16] = {0};
        copy_rest(rest, (const char *)from + i, bytes - i);
        copy_rest((char *)to + i, rest, bytes - i);
        largest = larger_magnitudes(largest, i_load(rest), wide);
    }
    return largest;
}
INLINE void copy_bytes(void *to, const void *from, int64_t bytes) { copy_bytes_max(to, from, bytes, i_set(0), 0); }

/* Copy the rectangle to `scratch`, where its columns are close together: rows of a large tensor are often a multiple of 4096 bytes
 * apart and then compete for the same few cache lines. A kernel indexes the result like x. `largest` becomes the larger of itself
 * and the magnitudes of the rectangle, as float bits, if it is copied. */
enum { SCRATCH_STRIDE = TILE_ROWS + 32 };
INLINE Matrix compact(const Matrix *x, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int wide, void *scratch, I *largest) {
    const int64_t size = wide ? 4 : 2;
    Matrix copy = *x;
    I all = i_set(0);
    if (x->stride_row != 1 || x->input == INPUT_F16 || row1 - row0 > TILE_ROWS || col1 - col0 > TILE_COLUMNS) return copy;
    for (int64_t col = col0; col < col1; col++)
        all = copy_bytes_max((char *)scratch + (col - col0) * SCRATCH_STRIDE * size,
                             (const char *)x->data + (row0 + col * x->stride_col) * size, (row1 - row0) * size, all, wide);
    *largest = i_max(*largest, wide ? all : i_max(i_shl(all, 16), i_and(all, i_set(0x7fff0000))));
    copy.data = (const char *)scratch - (row0 + col0 * SCRATCH_STRIDE) * size;
    copy.stride_col = SCRATCH_STRIDE;
    return copy;
}

/* Prefetch a share of the next rectangle into L2: the columns of group `group` of `groups`. Rows are adjacent in memory, or
 * the hardware prefetches. */
INLINE void prefetch_ahead(const Matrix *x, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int wide, int64_t ahead,
                           int64_t group, int64_t groups) {
    const int64_t size = wide ? 4 : 2, share = (col1 - col0 + groups - 1) / groups;
    if (!ahead || x->stride_row != 1) return;
    for (int64_t col = col0 + group * share; col < col0 + (group + 1) * share && col < col1; col++) {
        const uintptr_t at = (uintptr_t)x->data + (uintptr_t)((row0 + col * x->stride_col) * size + ahead);
        for (int64_t i = 0; i < (row1 - row0) * size; i += 64) __builtin_prefetch((const void *)(at + (uintptr_t)i), 0, 2);
    }
}

INLINE I magnitude_bits(F x) { return i_and(i_bits(x), i_set(INT32_MAX)); }

/* To BF16, ties to even, in the upper half of each lane; the lower half is undefined. Wrong for a NaN with bits in the lower half. */
INLINE I round_upper_half(F x) {
    const I bits = i_bits(x);
    return i_add_where(i_any(bits, i_set(0x10000)), i_add(bits, i_set(0x7fff)), i_set(1));
}
/* The same with a lower half of zeros. */
INLINE I round_to_bf16_fast(F x) { return i_and(round_upper_half(x), i_set((int32_t)0xffff0000)); }
INLINE I round_to_bf16(F x) { return i_pick(f_nan(x), i_set(0x7fc00000), round_to_bf16_fast(x)); }
#endif
