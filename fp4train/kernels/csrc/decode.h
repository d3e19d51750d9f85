/* Codes and scales back to values without the global scale: what backward does with a packed operand. */
#ifndef FP4_DECODE_H
#define FP4_DECODE_H
#include "rowwise.h"

INLINE F scale_factor(int scale, const void *scales, int64_t at, int64_t count) {
    int32_t words[16] = {0};
    uint8_t bytes[16] = {0};
    if (scale == SCALE_GIVEN) return f_set(1.0f);
    if (!scale_is_byte(scale)) {
        memcpy(words, (const float *)scales + at, 4 * (size_t)count);
        return f_bits(i_load(words));
    }
    memcpy(bytes, (const uint8_t *)scales + at, (size_t)count);
    return scale == SCALE_E4M3 ? element_value(i_load_u8(bytes), E4M3) : e8m0_value(i_load_u8(bytes));
}

INLINE void decode_with(const DecodeJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int element) {
    const int packed = element == E2M1, f32 = job->values_f32, exact = job->scale == SCALE_E4M3 || job->scale == SCALE_GIVEN;
    const int64_t block = job->block_cols, width = 16 * block, value_size = f32 ? 4 : 2;
    Strip s;
    for (int64_t row = row0; row < row1; row++)
        for (int64_t col = col0; col < col1; col += width) {
            const int64_t valid = job->cols - col < width ? job->cols - col : width;
            const int64_t coded = job->code_cols - col < width ? job->code_cols - col : width;
            const uint8_t *codes = job->codes + row * job->codes_stride + (packed ? col / 2 : col);
            char *values_at = (char *)job->values + (row * job->values_stride + col) * value_size;
            const int stream = job->stream && valid == width && ((uintptr_t)values_at & 63) == 0;
            void *values = valid < width || stream ? (void *)s.values : (void *)values_at;
            if (coded < width) {
                memset(s.codes, 0, sizeof s.codes);
                codes = memcpy(s.codes, codes, (size_t)(packed ? coded / 2 : coded));
            }
            f_store(s.decode, scale_factor(job->scale, job->scales, row / job->block_rows * job->scales_stride + col / block,
                                           (coded + block - 1) / block));
            for (int b = 0; b < 16; b++) {
                const F decode = f_set(s.decode[b]);
                for (int64_t i = b * block; i < (b + 1) * block; i += 16) {
                    const F value = packed ? f_table(e2m1_values, i_load_nibbles(codes + i / 2))
                                           : element_value(i_load_u8(codes + i), element);
                    store_values(values, i, f_mul(value, decode), f32, exact);
                }
            }
            if (stream)
                for (int64_t i = 0; i < width * value_size; i += 64) stream_line(values_at + i, s.values + i);
            else if (valid < width) memcpy(values_at, s.values, (size_t)(valid * value_size));
        }
    if (job->stream) stream_fence();
}

static void FN(decode)(const DecodeJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
    switch (job->element) {
    case E2M1: decode_with(job, row0, row1, col0, col1, E2M1); break;
    case E2M3: decode_with(job, row0, row1, col0, col1, E2M3); break;
    case E3M2: decode_with(job, row0, row1, col0, col1, E3M2); break;
    case E4M3: decode_with(job, row0, row1, col0, col1, E4M3); break;
    default: decode_with(job, row0, row1, col0, col1, E5M2); break;
    }
}
#endif
