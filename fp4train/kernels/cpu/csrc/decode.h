/* Decode codes and scales to values without the global scale: backward needs this for a packed operand. */
#ifndef FP4_DECODE_H
#define FP4_DECODE_H
#include "group.h"
#include "rowwise.h"

INLINE F scale_factor(int scale, const void *scales, int64_t at, int64_t count) {
    if (scale == SCALE_GIVEN) return f_set(1.0f);
    const int64_t size = scale_is_byte(scale) ? 1 : 4;
    const void *from = (const uint8_t *)scales + at * size;
    uint8_t some[64] = {0};
    if (count < 16) from = memcpy(some, from, (size_t)(count * size));
    switch (scale) {
    case SCALE_E4M3: return element_value(i_load_u8(from), E4M3);
    case SCALE_UE5M3: return element_value(i_load_u8(from), UE5M3);
    case SCALE_UE5M3_IEEE: return element_value(i_load_u8(from), UE5M3_IEEE);
    case SCALE_E8M0: return e8m0_value(i_load_u8(from));
    default: return f_load(from);
    }
}

/* 1 / S_enc, or 1 / m, of the outer blocks or tiles of a strip of a row, for each of its blocks. */
INLINE F outer_decode(const DecodeJob *job, int64_t row, int64_t col) {
    const F amax = tile_amaxes(job->outer_amax, job->outer_stride, job->block_cols, band_of(row, job->amax_rows), col);
    const F encode = job->scale == SCALE_E8M0 ? macro_mantissa(job->largest, amax) : global_encode(job->bound, amax);
    return f_div(f_set(1.0f), f_pick(not_finite(magnitude_bits(amax)), f_bits(i_set(0x7fc00000)), encode));
}

/* Thirty-two packed codes in sixteen bytes to BF16, by the table of their values; even codes are in the low nibbles. */
INLINE I decoded_pairs(const uint8_t *codes, const float *table, F factors, const Strip *s, int64_t at, int64_t block, int exact) {
    static const int32_t halves[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const I bytes = i_load_u8(codes);
    const F decode = block == 16 ? f_lanes(factors, i_add(i_load(halves), i_set((int32_t)at / 16))) : f_set(s->decode[whole_blocks(at, block)]);
    const F even = f_mul(f_lanes(f_load(table), bytes), decode), odd = f_mul(f_lanes(f_load(table), i_shr(bytes, 4)), decode);
    return exact ? i_upper_halves(i_bits(even), i_bits(odd)) : i_upper_halves(round_to_bf16(even), round_to_bf16(odd));
}

INLINE F decoded(const uint8_t *codes, const float *table, int64_t at, const Strip *s, int64_t block, int element) {
    const F value = is_packed(element) ? f_lanes(f_load(table), i_load_nibbles(codes + at / 2)) : element_value(i_load_u8(codes + at), element);
    return f_mul(value, f_set(s->decode[whole_blocks(at, block)]));
}

/* `nvfp4`: whole blocks of sixteen E2M1 whose values are exact in BF16, and are written so. */
INLINE void decode_with(const DecodeJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int element, int nvfp4) {
    const int packed = is_packed(element), f32 = !nvfp4 && job->values_f32;
    const int exact = nvfp4 || exact_in_bf16(job->element, job->scale, job->outer_amax != NULL);
    const int64_t block = nvfp4 ? 16 : job->block_cols, width = 16 * block, value_size = f32 ? 4 : 2;
    float table[16] = {0};
    if (packed) packed_values(element, table);
    Strip s;
    for (int64_t row = row0; row < row1; row++) {
        const int64_t scales_row = band_of(row, job->block_rows) * job->scales_stride;
        for (int64_t col = col0; col < col1; col += width) {
            const int64_t valid = job->cols - col < width ? job->cols - col : width;
            const int64_t coded = job->code_cols - col < width ? job->code_cols - col : width;
            const uint8_t *codes = job->codes + row * job->codes_stride + (packed ? col / 2 : col);
            char *values_at = (char *)job->values + (row * job->values_stride + col) * value_size;
            const int stream = job->stream && valid == width && ((uintptr_t)values_at & 63) == 0;
            char *values = valid < width ? (char *)s.values : values_at;
            if (coded < width) {
                memset(s.codes, 0, sizeof s.codes);
                codes = memcpy(s.codes, codes, (size_t)(packed ? coded / 2 : coded));
            }
            F factors = scale_factor(job->scale, job->scales, scales_row + whole_blocks(col, block), whole_blocks(coded + block - 1, block));
            if (job->outer_amax) factors = f_mul(factors, outer_decode(job, row, col));
            f_store(s.decode, factors);
            for (int64_t i = 0; i < width; i += 32) {
                if (packed && !f32) store_line(values + 2 * i, decoded_pairs(codes + i / 2, table, factors, &s, i, block, exact), stream);
                else store_values(values + value_size * i, decoded(codes, table, i, &s, block, element),
                                  decoded(codes, table, i + 16, &s, block, element), f32, exact, stream);
            }
            if (valid < width) memcpy(values_at, s.values, (size_t)(valid * value_size));
        }
    }
    if (job->stream) stream_fence();
}

/* A non-negative value of m bits of mantissa and a bias: code 2^m - 1 of all ones is NaN; subnormals where `gradual`. */
INLINE float byte_value(int code, int mantissa, int bias, int gradual, int nan) {
    const int stored = code >> mantissa, normal = stored || !gradual;
    const int significand = (code & ((1 << mantissa) - 1)) + (normal ? 1 << mantissa : 0);
    const uint32_t quantum = (uint32_t)(127 + (normal ? stored : 1) - bias - mantissa) << 23;
    float value;
    memcpy(&value, &quantum, sizeof value);
    return code == nan ? __builtin_nanf("") : (float)significand * value;
}

/* Tables of what the scales of HiF4 and IF4 stand for. */
typedef struct {
    float values[2][16];          /* of the codes; of IF4 also those of integers */
    float scales[256];            /* of the byte of a scale, without the bit that says which of the two */
    int32_t first[64], second[64]; /* HiF4: in the word of a block, the bits that double a column's factor */
} LevelTables;

INLINE void level_tables(const DecodeJob *job, LevelTables *t) {
    const int levels = job->scale == SCALE_HIF4;
    packed_values(job->element, t->values[0]);
    packed_values(IF4_INTEGERS, t->values[1]);
    for (int i = 0; i < 16; i++) t->values[1][i] *= if4_step;
    for (int i = 0; i < 256; i++) t->scales[i] = levels ? byte_value(i, 2, 48, 0, 255) : byte_value(i & 127, 3, 7, 1, 127);
    for (int i = 0; i < 64; i++) {
        t->first[i] = 1 << (8 + i / 8);
        t->second[i] = (int32_t)(1u << (16 + i / 4));
    }
}

INLINE F doubled_where(I word, const int32_t *bits, F x) {
    return f_pick(i_eq(i_and(word, i_load(bits)), i_set(0)), x, f_add(x, x));
}

/* Sixteen columns of HiF4, a factor for each four, or of IF4, a table of values for each block. */
INLINE F decoded_levels(const DecodeJob *job, const LevelTables *t, int64_t row, int64_t col, int64_t scales_row, int levels) {
    const int64_t at = scales_row + whole_blocks(col, job->block_cols);
    const I codes = i_load_nibbles(job->codes + row * job->codes_stride + col / 2);
    if (!levels) {
        const uint8_t byte = ((const uint8_t *)job->scales)[at];
        return f_mul(f_lanes(f_load(t->values[byte >> 7]), codes), f_set(t->scales[byte]));
    }
    uint32_t word;
    memcpy(&word, (const uint8_t *)job->scales + 4 * at, sizeof word);
    const I bits = i_set((int32_t)word);
    const F factors = doubled_where(bits, t->second + col % 64, doubled_where(bits, t->first + col % 64, f_set(t->scales[word & 255])));
    return f_mul(f_lanes(f_load(t->values[0]), codes), factors);
}

INLINE void decode_levels(const DecodeJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int levels) {
    const int64_t end = col1 < job->cols ? col1 : job->cols, size = job->values_f32 ? 4 : 2;
    const int exact = exact_in_bf16(job->element, job->scale, 0);
    LevelTables tables;
    level_tables(job, &tables);
    for (int64_t row = row0; row < row1; row++) {
        const int64_t scales_row = band_of(row, job->block_rows) * job->scales_stride;
        for (int64_t col = col0; col < end; col += 32) {
            const int64_t count = end - col < 32 ? end - col : 32;
            const F low = decoded_levels(job, &tables, row, col, scales_row, levels);
            const F high = count > 16 ? decoded_levels(job, &tables, row, col + 16, scales_row, levels) : f_set(0.0f);
            char *to = (char *)job->values + (row * job->values_stride + col) * size, whole[128] __attribute__((aligned(64)));
            store_values(count < 32 ? whole : to, low, high, job->values_f32, exact, 0);
            if (count < 32) memcpy(to, whole, (size_t)(count * size));
        }
    }
}

static void FN(decode)(const DecodeJob *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
    if (job->scale == SCALE_HIF4) return decode_levels(job, row0, row1, col0, col1, 1);
    if (job->scale == SCALE_IF4) return decode_levels(job, row0, row1, col0, col1, 0);
    const int nvfp4 = job->block_cols == 16 && !job->values_f32 && exact_in_bf16(job->element, job->scale, job->outer_amax != NULL);
    switch (job->element) {
    case E2M1:
        if (nvfp4) decode_with(job, row0, row1, col0, col1, E2M1, 1);
        else decode_with(job, row0, row1, col0, col1, E2M1, 0);
        break;
    case E2M3: decode_with(job, row0, row1, col0, col1, E2M3, 0); break;
    case E3M2: decode_with(job, row0, row1, col0, col1, E3M2, 0); break;
    case E4M3: decode_with(job, row0, row1, col0, col1, E4M3, 0); break;
    case E5M2: decode_with(job, row0, row1, col0, col1, E5M2, 0); break;
    default: decode_with(job, row0, row1, col0, col1, job->element, 0); break;
    }
}
#endif
