/* Row-wise quantisation of BF16 to BF16 values or codes: the main loop of emulated training.
 *
 * Widening uses no shuffles. Thirty-two neighbours are read as sixteen 32-bit words: even elements become float32 by a shift,
 * odd ones by a mask. Results are combined the same way: values by a shift and an or, E2M1 codes as nibbles of one byte. With
 * blocks of sixteen, lanes 0-7 belong to the first block of two and lanes 8-15 to the second.
 * Maxima are those of unsigned 16-bit integers, thirty-two at once.
 */
#ifndef FP4_ROWWISE_BF16_H
#define FP4_ROWWISE_BF16_H
#include "strip.h"

/* Compile-time constants. */
typedef struct {
    int nvfp4; /* see is_nvfp4 */
    int stochastic, values, codes;
} Variant;

/* Maxima of the sixteen blocks, as float bits. */
INLINE I pair_maxima(const Job *job, int64_t row, int64_t rows, int64_t col, int64_t block, Strip *s) {
    const int64_t width = 16 * block;
    const I magnitude = i_set(0x7fff7fff), high = i_set(0x7fff0000);
    const uint16_t *x = row_of(&job->x, row, col, width, 0, s->input);
    I largest[16];
    if (rows > 1) { /* down the band first, into the buffer of values, which is free until a row is rounded */
        int32_t *down = (int32_t *)s->values;
        for (int64_t i = 0; i < width / 2; i += 16) i_store(down + i, i_and(i_load((const int32_t *)x + i), magnitude));
        for (int64_t r = row + 1; r < row + rows; r++) {
            const int32_t *y = row_of(&job->x, r, col, width, 0, s->input);
            for (int64_t i = 0; i < width / 2; i += 16)
                i_store(down + i, i_max_u16(i_load(down + i), i_and(i_load(y + i), magnitude)));
        }
        x = (const uint16_t *)s->values;
    }
    if (block == 16) return i_block_max_bf16(x);
    for (int b = 0; b < 16; b++) {
        const int32_t *words = (const int32_t *)(x + b * block);
        I a = i_and(i_load(words), magnitude);
        for (int64_t i = 16; i < block / 2; i += 16) a = i_max_u16(a, i_and(i_load(words + i), magnitude));
        largest[b] = i_max(i_shl(a, 16), i_and(a, high));
    }
    return i_reduce_max(largest);
}

/* Thirty-two neighbours, at `i` of a strip. Meanwhile a round of Philox is run on `c`, if it is not NULL. */
INLINE void pair_32(const Job *job, const uint16_t *x, int64_t i, const uint16_t *random, Counters *c, int round, const Target *out,
                    const Strip *s, Variant v) {
    static const int32_t halves[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const int64_t block = v.nvfp4 ? 16 : job->block_cols;
    const int packed = v.nvfp4 || is_packed(job->element), positive_zero = v.nvfp4 || scale_has_mantissa(job->scale);
    const int exact = v.nvfp4 || exact_in_bf16(job->element, job->scale, job->outer);
    const Element e = element_of(v.nvfp4 ? E2M1 : job->element);
    const I words = i_load((const int32_t *)(x + i));
    F encode, decode;
    Rounded even, odd;
    if (block == 16) {
        const I pair = i_add(i_load(halves), i_set((int32_t)i / 16));
        encode = f_lanes(f_load(s->encode), pair);
        decode = f_lanes(f_load(s->decode), pair);
    } else {
        encode = f_set(s->encode[whole_blocks(i, block)]);
        decode = f_set(s->decode[whole_blocks(i, block)]);
    }
    F t0 = f_mul(f_bits(i_shl(words, 16)), encode), t1 = f_mul(f_bits(i_and(words, i_set((int32_t)0xffff0000))), encode);
    if (positive_zero) t0 = f_add(t0, f_set(0.0f)), t1 = f_add(t1, f_set(0.0f)); /* -0 is coded as 0 */
    if (v.stochastic) {
        const I bits = i_load((const int32_t *)random);
        if (c) philox_round(job, c, round);
        even = v.nvfp4 ? round_stochastic_e2m1(t0, random_low(bits)) : round_drawn(t0, random_low(bits), e, job->few_bits);
        odd = v.nvfp4 ? round_stochastic_e2m1(t1, random_high(bits)) : round_drawn(t1, random_high(bits), e, job->few_bits);
    } else {
        even = v.nvfp4 ? round_nearest_e2m1(t0, v.codes) : round_plainly(t0, e, job->away);
        odd = v.nvfp4 ? round_nearest_e2m1(t1, v.codes) : round_plainly(t1, e, job->away);
    }
    if (v.values) {
        const F y0 = f_mul(even.value, decode), y1 = f_mul(odd.value, decode);
        const I both = exact ? i_upper_halves(i_bits(y0), i_bits(y1)) : i_upper_halves(round_to_bf16(y0), round_to_bf16(y1));
        store_line(out->values + 2 * i, both, out->stream);
    }
    if (v.codes && packed) i_store_u8((uint8_t *)out->codes + i / 2, i_or(even.code, i_shl(odd.code, 4)));
    else if (v.codes) i_store_u16((uint16_t *)(out->codes + i), i_or(even.code, i_shl(odd.code, 8)));
}

/* `next`: the position after this one. NVFP4 draws the bits of that while it rounds this: the rounds of Philox are a chain of
 * multiplies, which leaves the CPU a third idle. */
INLINE void pair_row(const Job *job, int64_t row, int64_t col, Place next, Strip *s, Variant v) {
    const int64_t width = 16 * (v.nvfp4 ? 16 : job->block_cols);
    const uint16_t *x = row_of(&job->x, row, col, width, 0, s->input);
    const Target out = target_of(job, row, col, width, s);
    if (v.nvfp4 && v.stochastic) {
        Counters c[4];
        begin_row(job, next.row, next.col, c);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) pair_32(job, x, 32 * i, s->bits + 32 * i, c, 2 + i, &out, s, v);
        end_row(c, s->bits);
    } else {
        if (v.stochastic)
            for (int64_t i = 0; i < width; i += 256) random_row_256(job, row, col + i, s->bits + i);
        for (int64_t i = 0; i < width; i += 32) pair_32(job, x, i, s->bits + i, NULL, 0, &out, s, v);
    }
    finish_target(&out);
}

INLINE Scale scale_at(const Job *job, Place p, int64_t block, Global *global, Strip *s) {
    if (job->amax_stride) *global = row_scale(job, f_set(row_amax(job, p.row)));
    return strip_scale(job, pair_maxima(job, p.row, p.rows, p.col, block, s), *global, p.row, p.col);
}

/* The scales of the next strip are computed before the current strip is rounded: they are a chain of dependent instructions, twice
 * as long as the out-of-order window of the CPU, which can thus overlap it with the rounding. */
INLINE void pairs_with(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, Variant v) {
    const int64_t block = v.nvfp4 ? 16 : job->block_cols, width = 16 * block;
    Strip s;
    Place place = first_place(job, row0, row1, col0);
    Global global = row_scale(job, f_set(row_amax(job, row0)));
    Scale next = scale_at(job, place, block, &global, &s);
    if (v.nvfp4 && v.stochastic) random_row_256(job, place.row, place.col, s.bits);
    while (place.row < row1) {
        const Scale scale = next;
        const Place after = next_place(place, job, row1, col0, col1, width);
        if (after.row < row1) next = scale_at(job, after, block, &global, &s);
        store_scales(job, place.row, place.col, &scale, &s);
        for (int64_t r = place.row; r < place.row + place.rows; r++)
            pair_row(job, r, place.col, r + 1 < place.row + place.rows ? (Place){r + 1, place.col, 1} : after, &s, v);
        place = after;
    }
    if (job->stream) stream_fence();
}

/* Whether `strips_nvfp4` takes a rectangle: whole strips in place, one row per block, the usual scales under one of the tensor. */
INLINE int in_whole_strips(const Job *job, int64_t col0, int64_t col1) {
    return job->block_rows == 1 && !job->amax_stride && job->amax && job->scale == SCALE_E4M3 && job->formula == FORMULA_TE_2_14 &&
           job->x.stride_col == 1 && col1 <= job->x.cols && (col1 - col0) % 256 == 0 && no_underflow(job);
}

/* As `pair_32` for such a strip, whose scales are in registers. */
INLINE void nvfp4_32(const Job *job, const uint16_t *x, int i, F encodes, F decodes, const uint16_t *random, Counters *c, char *values,
                     uint8_t *codes, int stream, Variant v) {
    static const int32_t halves[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const I words = i_load((const int32_t *)(x + 32 * i)), pair = i_add(i_load(halves), i_set(2 * i));
    const F encode = f_lanes(encodes, pair), decode = f_lanes(decodes, pair);
    const F t0 = f_mul_positive_zero(f_bits(i_shl(words, 16)), encode);
    const F t1 = f_mul_positive_zero(f_bits(i_and(words, i_set((int32_t)0xffff0000))), encode);
    Rounded even, odd;
    if (v.stochastic) {
        const I bits = i_load((const int32_t *)(random + 32 * i));
        philox_round(job, c, 2 + i);
        even = round_stochastic_e2m1(t0, random_low(bits));
        odd = round_stochastic_e2m1(t1, random_high(bits));
    } else {
        even = round_nearest_e2m1(t0, v.codes);
        odd = round_nearest_e2m1(t1, v.codes);
    }
    if (v.values) store_line(values + 64 * i, i_upper_halves(i_bits(f_mul(even.value, decode)), i_bits(f_mul(odd.value, decode))), stream);
    if (v.codes) i_store_u8(codes + 16 * i, i_or(even.code, i_shl(odd.code, 4)));
}

/* `pairs_with` for whole strips. Nothing here hands the copy of the job on, so stores cannot change it: its fields stay in registers. */
INLINE void strips_nvfp4(const Job *given, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int stream, Variant v) {
    const Job local = *given, *const job = &local;
    const Global global = row_scale(job, f_set(*job->amax));
    uint16_t bits[256] __attribute__((aligned(64)));
    I all = i_set(0);
    const int64_t strips = (row1 - row0) * ((col1 - col0) / 256);
    int64_t row = row0, col = col0;
    const uint16_t *x = (const uint16_t *)job->x.data + row * job->x.stride_row + col;
    I largest = i_block_max_bf16(x);
    Scale next = scale_under(job, f_bits(largest), global, 0, E4M3);
    if (v.stochastic) random_row_256(job, row, col, bits);
    for (int64_t left = strips; left; left--) {
        const Scale scale = next;
        const uint16_t *const now = x;
        char *const values = (char *)job->values + 2 * (row * job->values_stride + col);
        uint8_t *const codes = job->codes + row * job->codes_stride + col / 2;
        Counters c[4];
        if (v.codes) i_store_u8((uint8_t *)job->scales + row * job->scales_stride + col / 16, scale.stored);
        all = i_max(all, largest);
        if (left > 1) {
            col += 256, x += 256;
            if (col == col1) {
                row++, col = col0;
                x = (const uint16_t *)job->x.data + row * job->x.stride_row + col;
            }
        }
        largest = i_block_max_bf16(x);
        next = scale_under(job, f_bits(largest), global, 0, E4M3);
        if (v.stochastic) begin_row(job, row, col, c);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) nvfp4_32(job, now, i, scale.encode, scale.decode, bits, c, values, codes, stream, v);
        if (v.stochastic) end_row(c, bits);
    }
    report(job, not_finite(all));
    if (stream) stream_fence();
}

/* Each variant is a function of its own. Where one function held all of them, GCC 12 allocated registers worse: the variants of
 * NVFP4 were 2 to 4 % slower, and every new variant changed the others. */
#define VARIANT(name, ...)                                                                                  \
    NOINLINE void name(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {            \
        pairs_with(job, row0, row1, col0, col1, (Variant){__VA_ARGS__});                                    \
    }
#define NVFP4(name, ...)                                                                                                            \
    NOINLINE void name##_strips(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {                           \
        const Variant v = {__VA_ARGS__};                                                                                            \
        if (v.values && job->stream && ((uintptr_t)job->values & 63) == 0 && job->values_stride % 32 == 0)                          \
            strips_nvfp4(job, row0, row1, col0, col1, 1, v);                                                                        \
        else strips_nvfp4(job, row0, row1, col0, col1, 0, v);                                                                       \
    }                                                                                                                               \
    VARIANT(name, __VA_ARGS__)
NVFP4(rows_nvfp4_values, 1, 0, 1, 0)
NVFP4(rows_nvfp4_codes, 1, 0, 0, 1)
NVFP4(rows_nvfp4_both, 1, 0, 1, 1)
NVFP4(rows_nvfp4_stochastic_values, 1, 1, 1, 0)
NVFP4(rows_nvfp4_stochastic_codes, 1, 1, 0, 1)
NVFP4(rows_nvfp4_stochastic_both, 1, 1, 1, 1)
#undef NVFP4
VARIANT(rows_bf16, 0, 0, job->values != NULL, job->codes != NULL)
VARIANT(rows_bf16_stochastic, 0, 1, job->values != NULL, job->codes != NULL)
#undef VARIANT

static void quantize_rows_bf16(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
    typedef void (*Rows)(const Job *, int64_t, int64_t, int64_t, int64_t);
    static const Rows nvfp4[2][2][3] = { /* whole strips; stochastic; values, codes, both */
        {{rows_nvfp4_values, rows_nvfp4_codes, rows_nvfp4_both},
         {rows_nvfp4_stochastic_values, rows_nvfp4_stochastic_codes, rows_nvfp4_stochastic_both}},
        {{rows_nvfp4_values_strips, rows_nvfp4_codes_strips, rows_nvfp4_both_strips},
         {rows_nvfp4_stochastic_values_strips, rows_nvfp4_stochastic_codes_strips, rows_nvfp4_stochastic_both_strips}}};
    const int s = job->stochastic != 0, form = job->codes == NULL ? 0 : job->values == NULL ? 1 : 2;
    if (is_nvfp4(job)) nvfp4[in_whole_strips(job, col0, col1)][s][form](job, row0, row1, col0, col1);
    else (s ? rows_bf16_stochastic : rows_bf16)(job, row0, row1, col0, col1);
}
#endif
