/* Sixteen lanes with AVX2: two registers per vector. vec_plain.h defines the meaning of each name. */
#ifndef FP4_VEC_H
#define FP4_VEC_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define FN(name) name##_avx2
#define INLINE static inline __attribute__((always_inline))

typedef struct { __m256 a, b; } F;
typedef struct { __m256i a, b; } I;
typedef I Q;
typedef I K; /* all ones or all zeros in each lane */

#define F2(name, op) INLINE F name(F x, F y) { return (F){op(x.a, y.a), op(x.b, y.b)}; }
#define I2(name, op) INLINE I name(I x, I y) { return (I){op(x.a, y.a), op(x.b, y.b)}; }

INLINE F f_set(float x) { return (F){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F f_load(const float *p) { return (F){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void f_store(float *p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
F2(f_add, _mm256_add_ps)
F2(f_sub, _mm256_sub_ps)
F2(f_mul, _mm256_mul_ps)
F2(f_div, _mm256_div_ps)
F2(f_min, _mm256_min_ps)
INLINE F f_sub_by_multiplier(F x, F y) { return f_sub(x, y); }
INLINE F f_add_exact_product(F x, F y, F z) { return f_add(x, f_mul(y, z)); }
INLINE F f_sub_exact_product(F x, F y, F z) { return f_sub(x, f_mul(y, z)); }
INLINE F f_fma(F x, F y, F z) { return (F){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F f_mul_positive_zero(F x, F y) { return f_fma(x, y, f_set(0.0f)); }
INLINE int flushes_subnormals(void) { return (_mm_getcsr() & 0x8000) != 0; }
INLINE F f_sqrt(F x) { return (F){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE F f_floor(F x) { return (F){_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
INLINE I i_bits(F x) { return (I){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INLINE F f_bits(I x) { return (F){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE F f_of_i(I x) { return (F){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I i_of_f(F x) { return (I){_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }

INLINE I i_set(int32_t x) { return (I){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I i_load(const int32_t *p) {
    return (I){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
INLINE void i_store(int32_t *p, I x) {
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
I2(i_add, _mm256_add_epi32)
I2(i_sub, _mm256_sub_epi32)
I2(i_and, _mm256_and_si256)
I2(i_or, _mm256_or_si256)
I2(i_xor, _mm256_xor_si256)
I2(i_max, _mm256_max_epi32)
I2(i_min, _mm256_min_epi32)
#define i_shl(x, n) shift_left(x, _mm_cvtsi32_si128(n))
#define i_shr(x, n) shift_right(x, _mm_cvtsi32_si128(n))
INLINE I shift_left(I x, __m128i n) { return (I){_mm256_sll_epi32(x.a, n), _mm256_sll_epi32(x.b, n)}; }
INLINE I shift_right(I x, __m128i n) { return (I){_mm256_srl_epi32(x.a, n), _mm256_srl_epi32(x.b, n)}; }
INLINE I i_shr_by(I x, int n) { return i_shr(x, n); }
INLINE I i_shl_by(I x, int n) { return i_shl(x, n); }

I2(i_max_u16, _mm256_max_epu16)
INLINE I i_upper_halves(I x, I y) {
    const I low = i_shr(x, 16);
    return (I){_mm256_blend_epi16(low.a, y.a, 0xaa), _mm256_blend_epi16(low.b, y.b, 0xaa)};
}
INLINE __m256i narrow_u16(I x) { /* values below 2**16 */
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
}
INLINE I i_joined_upper_halves(I x, I y) { return (I){narrow_u16(i_shr(x, 16)), narrow_u16(i_shr(y, 16))}; }
INLINE I i_blend_bits(I mask, I x, I y) {
    return (I){_mm256_or_si256(_mm256_and_si256(mask.a, x.a), _mm256_andnot_si256(mask.a, y.a)),
               _mm256_or_si256(_mm256_and_si256(mask.b, x.b), _mm256_andnot_si256(mask.b, y.b))};
}
INLINE I i_blend_not(I mask, I x, I y) { return i_blend_bits(mask, i_xor(x, i_set(-1)), y); }
INLINE F f_min_magnitude(F x, F y) { return f_min(f_bits(i_and(i_bits(x), i_set(INT32_MAX))), y); }
INLINE void i_stream(void *p, I x) {
    _mm256_stream_si256((__m256i *)p, x.a);
    _mm256_stream_si256((__m256i *)p + 1, x.b);
}

#define F_GT(x, y) _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_GT_OQ))
#define F_NAN(x, y) _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_UNORD_Q))
INLINE K f_gt(F x, F y) { return (K){F_GT(x.a, y.a), F_GT(x.b, y.b)}; }
INLINE K f_nan(F x) { return (K){F_NAN(x.a, x.a), F_NAN(x.b, x.b)}; }
I2(i_eq, _mm256_cmpeq_epi32)
I2(i_gt, _mm256_cmpgt_epi32)
INLINE K i_any(I x, I y) { return i_eq(i_eq(i_and(x, y), i_set(0)), i_set(0)); }
INLINE int k_bits(K k) {
    return _mm256_movemask_ps(_mm256_castsi256_ps(k.a)) | _mm256_movemask_ps(_mm256_castsi256_ps(k.b)) << 8;
}
INLINE I i_pick(K k, I yes, I no) {
    return (I){_mm256_blendv_epi8(no.a, yes.a, k.a), _mm256_blendv_epi8(no.b, yes.b, k.b)};
}
INLINE F f_pick(K k, F yes, F no) {
    return (F){_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(k.a)),
               _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(k.b))};
}
INLINE F f_add_up_where(K k, F x, F y) { /* x < y, so that sum - y is exact */
    const F sum = f_add(x, y);
    const I below = f_gt(x, f_sub(sum, y)); /* all ones is -1 */
    return f_pick(k, f_bits(i_sub(i_bits(sum), below)), x);
}
INLINE F f_sub_where(K k, F x, F y) { return f_pick(k, f_sub(x, y), x); }
INLINE I i_sub_where(K k, I x, I y) { return i_pick(k, i_sub(x, y), x); }
INLINE I i_add_where(K k, I x, I y) { return i_add(x, i_and(k, y)); }
INLINE F f_add_where(K k, F x, F y) { return f_pick(k, f_add(x, y), x); }

INLINE I i_load_u16(const uint16_t *p) {
    return (I){_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)),
               _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE I i_load_u8(const uint8_t *p) {
    return (I){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
               _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}
INLINE __m128i narrow_u8(I x) { /* values below 2**8 */
    const __m256i words = narrow_u16(x);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
INLINE void i_store_u16(uint16_t *p, I x) { _mm256_storeu_si256((__m256i *)p, narrow_u16(x)); }
INLINE void i_store_u8(uint8_t *p, I x) { _mm_storeu_si128((__m128i *)p, narrow_u8(x)); }
INLINE void i_store_nibbles(uint8_t *p, I x) {
    const __m128i bytes = narrow_u8(x);
    const __m128i pairs = _mm_and_si128(_mm_or_si128(bytes, _mm_srli_epi16(bytes, 4)), _mm_set1_epi16(0xff));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(pairs, pairs));
}
INLINE I i_load_nibbles(const uint8_t *p) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    const __m128i nibbles = _mm_and_si128(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)), _mm_set1_epi8(15));
    return (I){_mm256_cvtepu8_epi32(nibbles), _mm256_cvtepu8_epi32(_mm_srli_si128(nibbles, 8))};
}
INLINE __m256 lanes8(F x, __m256i index) { /* bit 3 chooses between the halves of x */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(x.a, index), _mm256_permutevar8x32_ps(x.b, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
INLINE F f_lanes(F x, I index) { return (F){lanes8(x, index.a), lanes8(x, index.b)}; }
INLINE F f_table8(const float *table, I index) {
    const __m256 x = _mm256_loadu_ps(table);
    return (F){_mm256_permutevar8x32_ps(x, index.a), _mm256_permutevar8x32_ps(x, index.b)};
}

INLINE __m256i reduce_max8(const I *v) { /* lane i: the largest of the sixteen lanes of v[i], i < 8 */
    __m256i a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = _mm256_max_epi32(v[i].a, v[i].b);
    for (int i = 0; i < 4; i++)
        b[i] = _mm256_max_epi32(_mm256_permute2x128_si256(a[i], a[i + 4], 0x20),
                                _mm256_permute2x128_si256(a[i], a[i + 4], 0x31)); /* lanes: rows i, i + 4 */
    for (int i = 0; i < 2; i++)
        c[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(b[2 * i], b[2 * i + 1]),
                                _mm256_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
    const __m256 c0 = _mm256_castsi256_ps(c[0]), c1 = _mm256_castsi256_ps(c[1]);
    return _mm256_max_epi32(_mm256_castps_si256(_mm256_shuffle_ps(c0, c1, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(c0, c1, 0xdd)));
}
INLINE I i_reduce_max(const I *v) { return (I){reduce_max8(v), reduce_max8(v + 8)}; }
INLINE I i_block_max_bf16(const uint16_t *p) {
    I v[16];
    const I magnitude = i_set(0x7fff);
    for (int i = 0; i < 16; i++) v[i] = i_and(i_load_u16(p + 16 * i), magnitude);
    return i_shl(i_reduce_max(v), 16);
}
/* the largest |x| of 256 BF16, in lanes of any order, as float bits */
INLINE I i_row_max_bf16(const uint16_t *p) { return i_block_max_bf16(p); }

INLINE void i_store_columns(const I *w, int k, uint8_t *out, int64_t stride) {
    int32_t lanes[8][16];
    for (int j = 0; j < k; j++) i_store(lanes[j], w[j]);
    for (int n = 0; n < 16; n++) {
        int32_t column[8];
        for (int j = 0; j < k; j++) column[j] = lanes[j][n];
        memcpy(out + n * stride, column, 4 * (size_t)k);
    }
}

INLINE Q q_set(uint64_t x) { return (Q){_mm256_set1_epi64x((int64_t)x), _mm256_set1_epi64x((int64_t)x)}; }
INLINE Q q_load(const uint64_t *p) { return i_load((const int32_t *)p); }
I2(q_add, _mm256_add_epi64)
I2(q_mul_low, _mm256_mul_epu32)
INLINE Q q_xor3(Q x, Q y, Q z) { return i_xor(i_xor(x, y), z); }
INLINE Q q_upper(Q x) { return (Q){_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
INLINE I i_interleave(Q x, Q y) {
    const Q high = {_mm256_slli_epi64(y.a, 32), _mm256_slli_epi64(y.b, 32)};
    return (I){_mm256_blend_epi32(x.a, high.a, 0xaa), _mm256_blend_epi32(x.b, high.b, 0xaa)};
}
INLINE Q q_joined(Q x, Q y) { return i_interleave(x, y); }
INLINE void q_store_pairs(uint8_t *p, Q low, Q high) {
    _mm256_storeu_si256((__m256i *)p, _mm256_unpacklo_epi64(low.a, high.a));
    _mm256_storeu_si256((__m256i *)(p + 32), _mm256_unpacklo_epi64(low.b, high.b));
    _mm256_storeu_si256((__m256i *)(p + 64), _mm256_unpackhi_epi64(low.a, high.a));
    _mm256_storeu_si256((__m256i *)(p + 96), _mm256_unpackhi_epi64(low.b, high.b));
}
INLINE void stream_line(void *to, const void *from) {
    _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)from + 1));
}
INLINE void stream_fence(void) { _mm_sfence(); }
#endif
