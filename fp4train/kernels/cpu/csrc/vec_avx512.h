/* Sixteen lanes with AVX-512 (F, BW, VL, DQ): one register per vector.
 *
 * The three vec_*.h files define the same names, and the kernels are compiled once with each. vec_plain.h defines the
 * meaning of each name in plain C; the other two must give the same bits.
 */
#ifndef FP4_VEC_H
#define FP4_VEC_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define FN(name) name##_avx512
#define INLINE static inline __attribute__((always_inline))

typedef __m512 F;
typedef __m512i I;
typedef __m512i Q;
typedef __mmask16 K;

/* floats */
INLINE F f_set(float x) { return _mm512_set1_ps(x); }
INLINE F f_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f_store(float *p, F x) { _mm512_storeu_ps(p, x); }
INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F f_sub_by_multiplier(F a, F b) { return _mm512_fnmadd_ps(b, _mm512_set1_ps(1.0f), a); }
INLINE F f_add_exact_product(F a, F b, F c) { return _mm512_fmadd_ps(b, c, a); }
INLINE F f_sub_exact_product(F a, F b, F c) { return _mm512_fnmadd_ps(b, c, a); }
INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F f_mul_positive_zero(F a, F b) { return _mm512_fmadd_ps(a, b, _mm512_setzero_ps()); }
INLINE int flushes_subnormals(void) { return (_mm_getcsr() & 0x8000) != 0; }
INLINE F f_sqrt(F a) { return _mm512_sqrt_ps(a); }
INLINE F f_floor(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE I i_bits(F a) { return _mm512_castps_si512(a); }
INLINE F f_bits(I a) { return _mm512_castsi512_ps(a); }
INLINE F f_of_i(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I i_of_f(F a) { return _mm512_cvttps_epi32(a); }

/* integers */
INLINE I i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I i_load(const int32_t *p) { return _mm512_loadu_si512(p); }
INLINE void i_store(int32_t *p, I x) { _mm512_storeu_si512(p, x); }
INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I i_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I i_xor(I a, I b) { return _mm512_xor_si512(a, b); }
INLINE I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
INLINE I i_min(I a, I b) { return _mm512_min_epi32(a, b); }
#define i_shl(a, n) _mm512_slli_epi32(a, n) /* n is a constant; macros keep it constant without optimisation */
#define i_shr(a, n) _mm512_srli_epi32(a, n)
INLINE I i_shr_by(I a, int n) { /* n may or may not be constant after inlining */
    return __builtin_constant_p(n) ? _mm512_srli_epi32(a, (unsigned)n) : _mm512_srl_epi32(a, _mm_cvtsi32_si128(n));
}
INLINE I i_shl_by(I a, int n) {
    return __builtin_constant_p(n) ? _mm512_slli_epi32(a, (unsigned)n) : _mm512_sll_epi32(a, _mm_cvtsi32_si128(n));
}

INLINE I i_max_u16(I a, I b) { return _mm512_max_epu16(a, b); }
/* the instruction writes over its first operand: better b or a than a mask that is used again */
INLINE I i_blend_bits(I mask, I a, I b) { return _mm512_ternarylogic_epi32(b, mask, a, 0xb8); }
INLINE F f_min_magnitude(F a, F b) { return _mm512_range_ps(a, b, 0x0a); }
INLINE I i_blend_not(I mask, I a, I b) { return _mm512_ternarylogic_epi32(a, mask, b, 0x2e); }
INLINE I i_upper_halves(I a, I b) {
    const __m512i order = _mm512_add_epi16(_mm512_set1_epi32(0x00210001), _mm512_setr_epi32(
        0x00000000, 0x00020002, 0x00040004, 0x00060006, 0x00080008, 0x000a000a, 0x000c000c, 0x000e000e,
        0x00100010, 0x00120012, 0x00140014, 0x00160016, 0x00180018, 0x001a001a, 0x001c001c, 0x001e001e));
    return _mm512_permutex2var_epi16(a, order, b);
}
INLINE I i_joined_upper_halves(I a, I b) {
    const __m512i order = _mm512_add_epi16(_mm512_set1_epi32(0x00030001), _mm512_setr_epi32(
        0x00000000, 0x00040004, 0x00080008, 0x000c000c, 0x00100010, 0x00140014, 0x00180018, 0x001c001c,
        0x00200020, 0x00240024, 0x00280028, 0x002c002c, 0x00300030, 0x00340034, 0x00380038, 0x003c003c));
    return _mm512_permutex2var_epi16(a, order, b);
}
INLINE void i_stream(void *p, I x) { _mm512_stream_si512(p, x); }

/* masks */
INLINE K f_gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE K f_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE K i_eq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
INLINE K i_gt(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
INLINE K i_any(I a, I b) { return _mm512_test_epi32_mask(a, b); }
INLINE int k_bits(K k) { return k; }
INLINE I i_pick(K k, I yes, I no) { return _mm512_mask_blend_epi32(k, no, yes); }
INLINE F f_pick(K k, F yes, F no) { return _mm512_mask_blend_ps(k, no, yes); }
INLINE F f_add_up_where(K k, F a, F b) {
    return _mm512_mask_add_round_ps(a, k, a, b, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
}
INLINE F f_sub_where(K k, F a, F b) { return _mm512_mask_sub_ps(a, k, a, b); }
INLINE I i_sub_where(K k, I a, I b) { return _mm512_mask_sub_epi32(a, k, a, b); }
INLINE I i_add_where(K k, I a, I b) { return _mm512_mask_add_epi32(a, k, a, b); }
INLINE F f_add_where(K k, F a, F b) { return _mm512_mask_add_ps(a, k, a, b); }

/* narrow memory */
INLINE I i_load_u16(const uint16_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE I i_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE void i_store_u16(uint16_t *p, I x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x)); }
INLINE void i_store_u8(uint8_t *p, I x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x)); }
INLINE void i_store_nibbles(uint8_t *p, I x) {
    const __m512i pairs = _mm512_or_si512(x, _mm512_srli_epi64(x, 28)); /* a byte in each 64-bit lane */
    _mm_storel_epi64((__m128i *)p, _mm512_cvtepi64_epi8(pairs));
}
INLINE I i_load_nibbles(const uint8_t *p) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    const __m512i wide = _mm512_cvtepu8_epi64(bytes);
    return _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi64(wide, 28)), _mm512_set1_epi32(15));
}

INLINE F f_lanes(F x, I index) { return _mm512_permutexvar_ps(index, x); }
INLINE F f_table8(const float *table, I index) {
    return _mm512_permutexvar_ps(index, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)));
}

/* lane i of the result is the largest lane of v[i] (signed) */
INLINE I i_reduce_max(const I *v) {
    I a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) /* rows 2i, 2i+1: lanes [even-index 128s | odd] folded to 8 candidates each */
        a[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(v[2 * i], v[2 * i + 1], 0x44),
                                _mm512_shuffle_i64x2(v[2 * i], v[2 * i + 1], 0xee));
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(a[2 * i], a[2 * i + 1], 0x88),
                                _mm512_shuffle_i64x2(a[2 * i], a[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++) /* 128-bit lane L of b[j] holds four candidates of row 4j+L */
        c[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]),
                                _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
    const __m512 c0 = _mm512_castsi512_ps(c[0]), c1 = _mm512_castsi512_ps(c[1]);
    const I d = _mm512_max_epi32(_mm512_castps_si512(_mm512_shuffle_ps(c0, c1, 0x88)),
                                 _mm512_castps_si512(_mm512_shuffle_ps(c0, c1, 0xdd)));
    /* now lane 4L+j belongs to row 4j+L */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_permutexvar_epi32(order, d);
}

/* lane b: the largest |x| of the block of sixteen BF16 at p + 16 b, as float bits. Magnitudes compare as unsigned
 * integers, so thirty-two elements are compared at once and only the result is converted. */
INLINE I i_block_max_bf16(const uint16_t *p) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    I a[4], b[2];
    for (int i = 0; i < 4; i++) {
        const __m512i x = _mm512_and_si512(_mm512_loadu_si512(p + 64 * i), magnitude);
        const __m512i y = _mm512_and_si512(_mm512_loadu_si512(p + 64 * i + 32), magnitude);
        a[i] = _mm512_max_epu16(_mm512_shuffle_i64x2(x, y, 0x88), _mm512_shuffle_i64x2(x, y, 0xdd));
    } /* 128-bit lane L of a[i]: eight candidates of block 4i+L */
    for (int i = 0; i < 2; i++)
        b[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                                _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    const __m512 b0 = _mm512_castsi512_ps(b[0]), b1 = _mm512_castsi512_ps(b[1]);
    const __m512i c = _mm512_max_epu16(_mm512_castps_si512(_mm512_shuffle_ps(b0, b1, 0x88)),
                                       _mm512_castps_si512(_mm512_shuffle_ps(b0, b1, 0xdd)));
    const __m512i high = _mm512_max_epu16(c, _mm512_slli_epi32(c, 16)); /* the result is in the upper half of a lane */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_permutexvar_epi32(order, _mm512_and_si512(high, _mm512_set1_epi32((int)0xffff0000u)));
}

/* the largest |x| of 256 BF16, in lanes of any order, as float bits */
INLINE I i_row_max_bf16(const uint16_t *p) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    I a = _mm512_and_si512(_mm512_loadu_si512(p), magnitude), b = _mm512_and_si512(_mm512_loadu_si512(p + 32), magnitude);
    for (int i = 64; i < 256; i += 64) {
        a = _mm512_max_epu16(a, _mm512_and_si512(_mm512_loadu_si512(p + i), magnitude));
        b = _mm512_max_epu16(b, _mm512_and_si512(_mm512_loadu_si512(p + i + 32), magnitude));
    }
    a = _mm512_max_epu16(a, b);
    a = _mm512_max_epu16(a, _mm512_slli_epi32(a, 16));
    return _mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000u));
}

/* lane n of w[0..k) becomes k consecutive 32-bit words at out + n * stride bytes; k is 2, 4 or 8 */
INLINE void i_store_columns(const I *w, int k, uint8_t *out, int64_t stride) {
    if (k == 2) {
        uint64_t pairs[16] __attribute__((aligned(64)));
        const __m512i lo = _mm512_unpacklo_epi32(w[0], w[1]), hi = _mm512_unpackhi_epi32(w[0], w[1]);
        _mm512_store_si512(pairs, lo);
        _mm512_store_si512(pairs + 8, hi); /* 128-bit lane L: columns 4L, 4L+1 in lo, 4L+2, 4L+3 in hi */
        for (int n = 0; n < 16; n++)
            memcpy(out + n * stride, pairs + 8 * ((n >> 1) & 1) + 2 * (n >> 2) + (n & 1), 8);
        return;
    }
    __m512i q[2][4]; /* 128-bit lane L of q[j][i]: words 4j.. of column 4L+i */
    for (int j = 0; 4 * j < k; j++) {
        const __m512i p0 = _mm512_unpacklo_epi32(w[4 * j], w[4 * j + 1]), p1 = _mm512_unpackhi_epi32(w[4 * j], w[4 * j + 1]);
        const __m512i p2 = _mm512_unpacklo_epi32(w[4 * j + 2], w[4 * j + 3]);
        const __m512i p3 = _mm512_unpackhi_epi32(w[4 * j + 2], w[4 * j + 3]);
        q[j][0] = _mm512_unpacklo_epi64(p0, p2);
        q[j][1] = _mm512_unpackhi_epi64(p0, p2);
        q[j][2] = _mm512_unpacklo_epi64(p1, p3);
        q[j][3] = _mm512_unpackhi_epi64(p1, p3);
    }
    for (int i = 0; i < 4; i++) {
        uint8_t *at = out + i * stride;
        if (k == 4) {
            _mm_storeu_si128((__m128i *)at, _mm512_castsi512_si128(q[0][i]));
            _mm_storeu_si128((__m128i *)(at + 4 * stride), _mm512_extracti32x4_epi32(q[0][i], 1));
            _mm_storeu_si128((__m128i *)(at + 8 * stride), _mm512_extracti32x4_epi32(q[0][i], 2));
            _mm_storeu_si128((__m128i *)(at + 12 * stride), _mm512_extracti32x4_epi32(q[0][i], 3));
        } else {
            const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), last = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
            const __m512i a = _mm512_permutex2var_epi64(q[0][i], first, q[1][i]);
            const __m512i b = _mm512_permutex2var_epi64(q[0][i], last, q[1][i]);
            _mm256_storeu_si256((__m256i *)at, _mm512_castsi512_si256(a));
            _mm256_storeu_si256((__m256i *)(at + 4 * stride), _mm512_extracti64x4_epi64(a, 1));
            _mm256_storeu_si256((__m256i *)(at + 8 * stride), _mm512_castsi512_si256(b));
            _mm256_storeu_si256((__m256i *)(at + 12 * stride), _mm512_extracti64x4_epi64(b, 1));
        }
    }
}

/* eight 64-bit lanes, for Philox */
INLINE Q q_set(uint64_t x) { return _mm512_set1_epi64((int64_t)x); }
INLINE Q q_load(const uint64_t *p) { return _mm512_loadu_si512(p); }
INLINE Q q_add(Q a, Q b) { return _mm512_add_epi64(a, b); }
INLINE Q q_xor3(Q a, Q b, Q c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
INLINE Q q_mul_low(Q a, Q b) { return _mm512_mul_epu32(a, b); }
/* the upper half of each lane in the lower; the upper half of the result is undefined */
INLINE Q q_upper(Q a) { return _mm512_shuffle_epi32(a, 0xb1); }
/* 32-bit lanes: even ones from the low halves of a, odd ones from the low halves of b */
INLINE I i_interleave(Q a, Q b) { return _mm512_mask_shuffle_epi32(a, 0xaaaa, b, 0xa0); }
INLINE Q q_joined(Q a, Q b) { return i_interleave(a, b); }
/* 128 bits (low[i], high[i]) for lane i = 2 L + k go to the 16 bytes numbered 4 k + L */
INLINE void q_store_pairs(uint8_t *p, Q low, Q high) {
    _mm512_storeu_si512(p, _mm512_unpacklo_epi64(low, high));
    _mm512_storeu_si512(p + 64, _mm512_unpackhi_epi64(low, high));
}
/* copies whole 64-byte lines, bypassing the caches; `to` is 64-byte aligned */
INLINE void stream_line(void *to, const void *from) {
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}
INLINE void stream_fence(void) { _mm_sfence(); }
#endif
