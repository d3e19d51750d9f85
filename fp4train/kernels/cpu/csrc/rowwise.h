/* Row-wise quantisation of any input: float32 and FP16, and BF16 if the values are written as float32. One vector is
 * sixteen neighbours; formats are looked up at run time. See strip.h for the loop structure. */
#ifndef FP4_ROWWISE_H
#define FP4_ROWWISE_H
#include "rowwise_bf16.h"

/* Maxima of the sixteen blocks, as float bits. */
INLINE I strip_maxima(const Job *job, int64_t row, int64_t rows, int64_t col, int wide, Strip *s, Variant v) {
    const int64_t block = v.nvfp4 ? 16 : job->block_cols, width = 16 * block;
    I largest[16];
#pragma GCC unroll 16
    for (int b = 0; b < 16; b++) largest[b] = i_set(0);
    for (int64_t r = row; r < row + rows; r++) {
        const void *x = row_of(&job->x, r, col, width, wide, s->input);
#pragma GCC unroll 16
        for (int b = 0; b < 16; b++)
            for (int64_t i = b * block; i < (b + 1) * block; i += 16)
                largest[b] = i_max(largest[b], magnitude_bits(load_floats(x, i, wide)));
    }
    return i_reduce_max(largest);
}

/* Thirty-two neighbours, as float32 or BF16. */
INLINE void store_values(char *to, F a, F b, int f32, int exact, int stream) {
    if (f32) {
        store_line(to, i_bits(a), stream);
        store_line(to + 64, i_bits(b), stream);
    } else {
        store_line(to, exact ? i_joined_upper_halves(i_bits(a), i_bits(b))
                             : i_joined_upper_halves(round_to_bf16(a), round_to_bf16(b)), stream);
    }
}

INLINE void strip_row(const Job *job, int64_t row, int64_t col, Strip *s, int wide, Variant v) {
    const int64_t block = v.nvfp4 ? 16 : job->block_cols, width = 16 * block, value_size = job->values_f32 ? 4 : 2;
    const int packed = v.nvfp4 || is_packed(job->element), positive_zero = v.nvfp4 || scale_has_mantissa(job->scale);
    const int f32 = !v.nvfp4 && job->values_f32, exact = v.nvfp4 || exact_in_bf16(job->element, job->scale, job->outer);
    const Element e = element_of(v.nvfp4 ? E2M1 : job->element);
    const void *x = row_of(&job->x, row, col, width, wide, s->input);
    const Target out = target_of(job, row, col, width, s);

    if (v.stochastic)
        for (int64_t i = 0; i < width; i += 256) random_row_256(job, row, col + i, s->bits + i);
    for (int64_t i = 0; i < width; i += 32) {
        F y[2];
        for (int half = 0; half < 2; half++) {
            const int64_t at = i + 16 * half, b = whole_blocks(at, block);
            F t = f_mul(load_floats(x, at, wide), f_set(s->encode[b]));
            if (positive_zero) t = f_add(t, f_set(0.0f)); /* -0 is coded as 0 */
            const Rounded q = v.stochastic ? round_drawn(t, random_low(i_load_u16(s->bits + at)), e, job->few_bits)
                              : v.nvfp4    ? round_nearest_e2m1(t, v.codes)
                                           : round_plainly(t, e, job->away);
            y[half] = f_mul(q.value, f_set(s->decode[b]));
            if (v.codes && packed) i_store_nibbles((uint8_t *)out.codes + at / 2, q.code);
            else if (v.codes) i_store_u8((uint8_t *)out.codes + at, q.code);
        }
        if (v.values) store_values(out.values + value_size * i, y[0], y[1], f32, exact, out.stream);
    }
    finish_target(&out);
}

INLINE void rows_with(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int wide, Variant v) {
    Strip s;
    Global global = row_scale(job, f_set(row_amax(job, row0)));
    for (int64_t row = row0; row < row1; row += job->block_rows) {
        const int64_t rows = row1 - row < job->block_rows ? row1 - row : job->block_rows;
        if (job->amax_stride) global = row_scale(job, f_set(row_amax(job, row)));
        for (int64_t col = col0; col < col1; col += 16 * job->block_cols) {
            const Scale scale = strip_scale(job, strip_maxima(job, row, rows, col, wide, &s, v), global, row, col);
            store_scales(job, row, col, &scale, &s);
            for (int64_t r = row; r < row + rows; r++) strip_row(job, r, col, &s, wide, v);
        }
    }
    if (job->stream) stream_fence();
}

static void FN(quantize_rows)(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
    const int wide = job->x.input != INPUT_BF16, values = job->values != NULL, codes = job->codes != NULL;
    if (!wide && !(values && job->values_f32)) return quantize_rows_bf16(job, row0, row1, col0, col1);
    if (wide && is_nvfp4(job) && !job->stochastic && !codes) return rows_with(job, row0, row1, col0, col1, 1, (Variant){1, 0, 1, 0});
    if (wide && job->stochastic) return rows_with(job, row0, row1, col0, col1, 1, (Variant){0, 1, values, codes});
    if (wide) return rows_with(job, row0, row1, col0, col1, 1, (Variant){0, 0, values, codes});
    if (job->stochastic) return rows_with(job, row0, row1, col0, col1, 0, (Variant){0, 1, values, codes});
    rows_with(job, row0, row1, col0, col1, 0, (Variant){0, 0, values, codes});
}
#endif
