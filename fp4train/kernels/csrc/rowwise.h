/* Row-wise quantisation of any input: float32 and FP16, and BF16 where the values come out as float32. One vector is sixteen
 * neighbours; formats are looked up at run time. See strip.h for the shape of the work. */
#ifndef FP4_ROWWISE_H
#define FP4_ROWWISE_H
#include "rowwise_bf16.h"

INLINE I strip_maxima(const Job *job, int64_t row, int64_t rows, int64_t col, int wide, Strip *s) {
    const int64_t block = job->block_cols, width = 16 * block;
    I largest[16];
    for (int b = 0; b < 16; b++) largest[b] = i_set(0);
    for (int64_t r = row; r < row + rows; r++) {
        const void *x = row_of(&job->x, r, col, width, wide, s->input);
        for (int b = 0; b < 16; b++)
            for (int64_t i = b * block; i < (b + 1) * block; i += 16)
                largest[b] = i_max(largest[b], magnitude_bits(load_floats(x, i, wide)));
    }
    return i_reduce_max(largest);
}

INLINE void store_values(void *to, int64_t at, F value, int f32, int exact) {
    if (f32) f_store((float *)to + at, value);
    else i_store_u16((uint16_t *)to + at, i_shr(exact ? i_bits(value) : round_to_bf16(value), 16));
}

INLINE void strip_row(const Job *job, int64_t row, int64_t col, Strip *s, int wide, int stochastic) {
    const Element e = element_of(job->element);
    const int64_t block = job->block_cols, width = 16 * block;
    const int packed = job->element == E2M1, exact = job->scale == SCALE_E4M3 || job->scale == SCALE_GIVEN;
    const void *x = row_of(&job->x, row, col, width, wide, s->input);
    const Target out = target_of(job, row, col, width, s);

    if (stochastic)
        for (int64_t i = 0; i < width; i += 256) random_row_256(job, row, col + i, s->bits + i);
    for (int b = 0; b < 16; b++) {
        const F encode = f_set(s->encode[b]), decode = f_set(s->decode[b]);
        for (int64_t i = b * block; i < (b + 1) * block; i += 16) {
            F t = f_mul(load_floats(x, i, wide), encode);
            if (job->scale == SCALE_E4M3) t = f_add(t, f_set(0.0f)); /* -0 is coded as 0 */
            const Rounded q = stochastic ? round_stochastic(t, random_low(i_load_u16(s->bits + i)), e)
                                         : round_nearest(t, e);
            if (out.values) store_values(out.values, i, f_mul(q.value, decode), job->values_f32, exact);
            if (out.codes && packed) i_store_nibbles((uint8_t *)out.codes + i / 2, q.code);
            else if (out.codes) i_store_u8((uint8_t *)out.codes + i, q.code);
        }
    }
    finish_target(&out);
}

INLINE void rows_with(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int wide, int stochastic) {
    Strip s;
    for (int64_t row = row0; row < row1; row += job->block_rows) {
        const int64_t rows = row1 - row < job->block_rows ? row1 - row : job->block_rows;
        const Global global = row_scale(job, f_set(job->amax ? job->amax[row * job->amax_stride] : 0.0f));
        for (int64_t col = col0; col < col1; col += 16 * job->block_cols) {
            const Scale scale = block_scale(job, strip_maxima(job, row, rows, col, wide, &s), global);
            store_scales(job, row, col, &scale, &s);
            for (int64_t r = row; r < row + rows; r++) strip_row(job, r, col, &s, wide, stochastic);
        }
    }
}

static void FN(quantize_rows)(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
    const int wide = job->x.input != INPUT_BF16;
    if (!wide && !job->values_f32) return quantize_rows_bf16(job, row0, row1, col0, col1);
    if (wide && job->stochastic) return rows_with(job, row0, row1, col0, col1, 1, 1);
    if (wide) return rows_with(job, row0, row1, col0, col1, 1, 0);
    if (job->stochastic) return rows_with(job, row0, row1, col0, col1, 0, 1);
    rows_with(job, row0, row1, col0, col1, 0, 0);
}
#endif
