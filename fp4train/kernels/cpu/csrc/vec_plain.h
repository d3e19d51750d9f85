/* Sixteen lanes in plain C: the definition of every name, and the code for CPUs without AVX.
 *
 *   F   sixteen float32          I   sixteen int32
 *   K   sixteen truth values     Q   eight uint64 (Philox works on the low half of each)
 */
#ifndef FP4_VEC_H
#define FP4_VEC_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define FN(name) name##_plain
#define INLINE static inline

typedef struct { float v[16]; } F;
typedef struct { int32_t v[16]; } I;
typedef struct { uint64_t v[8]; } Q;
typedef struct { int32_t v[16]; } K;

#define LANES(i) for (int i = 0; i < 16; i++)
#define LANEWISE(name, R, A, expression) \
    INLINE R name(A a, A b) { R r; LANES(i) r.v[i] = expression; return r; }

INLINE F f_set(float x) { F r; LANES(i) r.v[i] = x; return r; }
INLINE F f_load(const float *p) { F r; memcpy(&r, p, sizeof r); return r; }
INLINE void f_store(float *p, F x) { memcpy(p, &x, sizeof x); }
LANEWISE(f_add, F, F, a.v[i] + b.v[i])
LANEWISE(f_sub, F, F, a.v[i] - b.v[i])
LANEWISE(f_mul, F, F, a.v[i] * b.v[i])
LANEWISE(f_div, F, F, a.v[i] / b.v[i])
LANEWISE(f_min, F, F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]) /* b where either is NaN, as minps */
INLINE F f_sub_by_multiplier(F a, F b) { return f_sub(a, b); } /* the same; another unit of the CPU may compute it */
INLINE F f_add_exact_product(F a, F b, F c) { return f_add(a, f_mul(b, c)); } /* b * c is exact, so fusing changes nothing */
INLINE F f_sub_exact_product(F a, F b, F c) { return f_sub(a, f_mul(b, c)); }
INLINE F f_fma(F a, F b, F c) { LANES(i) a.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return a; } /* a b + c, rounded once */
INLINE F f_mul_positive_zero(F a, F b) { return f_add(f_mul(a, b), f_set(0.0f)); } /* of products that do not round to 0 */
INLINE int flushes_subnormals(void) { return 0; } /* whether the caller does not care: there is no faster sum here */
INLINE F f_sqrt(F a) { LANES(i) a.v[i] = sqrtf(a.v[i]); return a; }
INLINE F f_floor(F a) { LANES(i) a.v[i] = floorf(a.v[i]); return a; }
INLINE I i_bits(F a) { I r; memcpy(&r, &a, sizeof r); return r; }
INLINE F f_bits(I a) { F r; memcpy(&r, &a, sizeof r); return r; }
INLINE F f_of_i(I a) { F r; LANES(i) r.v[i] = (float)a.v[i]; return r; }
INLINE I i_of_f(F a) { /* truncates; out of range gives INT_MIN, as cvttps */
    I r;
    LANES(i) r.v[i] = a.v[i] > -2147483904.0f && a.v[i] < 2147483648.0f ? (int32_t)a.v[i] : INT32_MIN;
    return r;
}

INLINE I i_set(int32_t x) { I r; LANES(i) r.v[i] = x; return r; }
INLINE I i_load(const int32_t *p) { I r; memcpy(&r, p, sizeof r); return r; }
INLINE void i_store(int32_t *p, I x) { memcpy(p, &x, sizeof x); }
LANEWISE(i_add, I, I, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]))
LANEWISE(i_sub, I, I, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]))
LANEWISE(i_and, I, I, a.v[i] & b.v[i])
LANEWISE(i_or, I, I, a.v[i] | b.v[i])
LANEWISE(i_xor, I, I, a.v[i] ^ b.v[i])
LANEWISE(i_max, I, I, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
LANEWISE(i_min, I, I, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
INLINE I i_shl(I a, int n) { LANES(i) a.v[i] = (int32_t)((uint32_t)a.v[i] << n); return a; }
INLINE I i_shr(I a, int n) { LANES(i) a.v[i] = (int32_t)((uint32_t)a.v[i] >> n); return a; }
INLINE I i_shr_by(I a, int n) { return i_shr(a, n); } /* i_shl and i_shr take a literal, these any count */
INLINE I i_shl_by(I a, int n) { return i_shl(a, n); }

INLINE I i_max_u16(I a, I b) { /* of thirty-two unsigned 16-bit lanes */
    uint16_t x[32], y[32];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 32; i++) x[i] = x[i] > y[i] ? x[i] : y[i];
    memcpy(&a, x, sizeof x);
    return a;
}
INLINE I i_upper_halves(I a, I b) { /* of a into the lower halves, of b into the upper ones */
    LANES(i) a.v[i] = (int32_t)((uint32_t)a.v[i] >> 16 | ((uint32_t)b.v[i] & 0xffff0000u));
    return a;
}
INLINE I i_joined_upper_halves(I a, I b) { /* of a in the first eight lanes, of b in the others */
    I r;
    for (int i = 0; i < 8; i++) {
        r.v[i] = (int32_t)((uint32_t)a.v[2 * i] >> 16 | ((uint32_t)a.v[2 * i + 1] & 0xffff0000u));
        r.v[8 + i] = (int32_t)((uint32_t)b.v[2 * i] >> 16 | ((uint32_t)b.v[2 * i + 1] & 0xffff0000u));
    }
    return r;
}
INLINE I i_blend_bits(I mask, I a, I b) { LANES(i) a.v[i] = (mask.v[i] & a.v[i]) | (~mask.v[i] & b.v[i]); return a; }
INLINE I i_blend_not(I mask, I a, I b) { LANES(i) a.v[i] = (mask.v[i] & ~a.v[i]) | (~mask.v[i] & b.v[i]); return a; }
INLINE F f_min_magnitude(F a, F b) { LANES(i) a.v[i] = fabsf(a.v[i]) < b.v[i] ? fabsf(a.v[i]) : b.v[i]; return a; } /* b > 0 */
INLINE void i_stream(void *p, I x) { memcpy(p, &x, sizeof x); } /* bypasses the caches if the CPU can; p is aligned to 64 */

LANEWISE(f_gt, K, F, a.v[i] > b.v[i])
INLINE K f_nan(F a) { K r; LANES(i) r.v[i] = a.v[i] != a.v[i]; return r; }
LANEWISE(i_eq, K, I, a.v[i] == b.v[i])
LANEWISE(i_gt, K, I, a.v[i] > b.v[i])
LANEWISE(i_any, K, I, (a.v[i] & b.v[i]) != 0)
INLINE int k_bits(K k) { int r = 0; LANES(i) r |= k.v[i] << i; return r; } /* bit i: lane i */
INLINE I i_pick(K k, I yes, I no) { LANES(i) yes.v[i] = k.v[i] ? yes.v[i] : no.v[i]; return yes; }
INLINE F f_pick(K k, F yes, F no) { LANES(i) yes.v[i] = k.v[i] ? yes.v[i] : no.v[i]; return yes; }
/* a + b rounded up, in lanes of k, where 0 <= a < b <= 1: then sum - b is exact, and says whether the sum is too small */
INLINE F f_add_up_where(K k, F a, F b) {
    LANES(i) {
        const float sum = a.v[i] + b.v[i];
        int32_t bits;
        memcpy(&bits, &sum, 4);
        bits += sum - b.v[i] < a.v[i];
        if (k.v[i]) memcpy(&a.v[i], &bits, 4);
    }
    return a;
}
INLINE F f_sub_where(K k, F a, F b) { LANES(i) a.v[i] = k.v[i] ? a.v[i] - b.v[i] : a.v[i]; return a; }
INLINE I i_sub_where(K k, I a, I b) { LANES(i) a.v[i] = k.v[i] ? a.v[i] - b.v[i] : a.v[i]; return a; }
INLINE I i_add_where(K k, I a, I b) { LANES(i) a.v[i] = k.v[i] ? a.v[i] + b.v[i] : a.v[i]; return a; }
INLINE F f_add_where(K k, F a, F b) { LANES(i) a.v[i] = k.v[i] ? a.v[i] + b.v[i] : a.v[i]; return a; }

INLINE I i_load_u16(const uint16_t *p) { I r; LANES(i) r.v[i] = p[i]; return r; }
INLINE I i_load_u8(const uint8_t *p) { I r; LANES(i) r.v[i] = p[i]; return r; }
INLINE void i_store_u16(uint16_t *p, I x) { LANES(i) p[i] = (uint16_t)x.v[i]; }
INLINE void i_store_u8(uint8_t *p, I x) { LANES(i) p[i] = (uint8_t)x.v[i]; }
/* two four-bit codes per byte, the first in the low nibble */
INLINE void i_store_nibbles(uint8_t *p, I x) {
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(x.v[2 * i] | x.v[2 * i + 1] << 4);
}
INLINE I i_load_nibbles(const uint8_t *p) { I r; LANES(i) r.v[i] = p[i / 2] >> 4 * (i & 1) & 15; return r; }
/* lanes of x selected by the last four bits of each index; lanes of a table of eight, by the last three */
INLINE F f_lanes(F x, I index) { F r; LANES(i) r.v[i] = x.v[index.v[i] & 15]; return r; }
INLINE F f_table8(const float *table, I index) { F r; LANES(i) r.v[i] = table[index.v[i] & 7]; return r; }

/* lane i of the result is the largest lane of v[i] (signed) */
INLINE I i_reduce_max(const I *v) {
    I r;
    LANES(i) {
        r.v[i] = v[i].v[0];
        LANES(j) r.v[i] = v[i].v[j] > r.v[i] ? v[i].v[j] : r.v[i];
    }
    return r;
}
/* lane b: the largest |x| of the block of sixteen BF16 at p + 16 b, as float bits */
INLINE I i_block_max_bf16(const uint16_t *p) {
    I r;
    LANES(b) {
        uint16_t largest = 0;
        LANES(j) {
            const uint16_t magnitude = p[16 * b + j] & 0x7fff;
            largest = magnitude > largest ? magnitude : largest;
        }
        r.v[b] = (int32_t)((uint32_t)largest << 16);
    }
    return r;
}
/* the largest |x| of 256 BF16, in lanes of any order, as float bits */
INLINE I i_row_max_bf16(const uint16_t *p) { return i_block_max_bf16(p); }
/* lane n of w[0..k) becomes k consecutive 32-bit words at out + n * stride bytes; k is 2, 4 or 8 */
INLINE void i_store_columns(const I *w, int k, uint8_t *out, int64_t stride) {
    LANES(n) for (int j = 0; j < k; j++) memcpy(out + n * stride + 4 * j, &w[j].v[n], 4);
}

#define LANES8(i) for (int i = 0; i < 8; i++)
INLINE Q q_set(uint64_t x) { Q r; LANES8(i) r.v[i] = x; return r; }
INLINE Q q_load(const uint64_t *p) { Q r; memcpy(&r, p, sizeof r); return r; }
INLINE Q q_add(Q a, Q b) { LANES8(i) a.v[i] += b.v[i]; return a; }
INLINE Q q_xor3(Q a, Q b, Q c) { LANES8(i) a.v[i] ^= b.v[i] ^ c.v[i]; return a; }
INLINE Q q_mul_low(Q a, Q b) { LANES8(i) a.v[i] = (uint64_t)(uint32_t)a.v[i] * (uint32_t)b.v[i]; return a; }
INLINE Q q_upper(Q a) { LANES8(i) a.v[i] >>= 32; return a; }
/* 32-bit lanes: even ones from the low halves of a, odd ones from the low halves of b */
INLINE I i_interleave(Q a, Q b) {
    I r;
    LANES8(i) {
        r.v[2 * i] = (int32_t)(uint32_t)a.v[i];
        r.v[2 * i + 1] = (int32_t)(uint32_t)b.v[i];
    }
    return r;
}
/* the same in 64-bit lanes */
INLINE Q q_joined(Q a, Q b) { LANES8(i) a.v[i] = (uint32_t)a.v[i] | b.v[i] << 32; return a; }
/* 128 bits (low[i], high[i]) for lane i = 2 L + k go to the 16 bytes numbered 4 k + L */
INLINE void q_store_pairs(uint8_t *p, Q low, Q high) {
    LANES8(i) {
        uint8_t *at = p + 16 * (4 * (i & 1) + i / 2);
        memcpy(at, &low.v[i], 8);
        memcpy(at + 8, &high.v[i], 8);
    }
}
/* copies a whole 64-byte line, bypassing the caches if the CPU can */
INLINE void stream_line(void *to, const void *from) { memcpy(to, from, 64); }
INLINE void stream_fence(void) {}
#endif
