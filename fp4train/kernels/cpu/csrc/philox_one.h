/* Philox4x32-10 of one counter: the constants, and the signs that a Hadamard transform draws from a key. */
#ifndef FP4_PHILOX_ONE_H
#define FP4_PHILOX_ONE_H
#include <stdint.h>

enum { ROUNDS = 10 };
static const uint64_t multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;

static inline __attribute__((always_inline)) uint32_t round_key0(uint64_t seed, int round) { return (uint32_t)seed + (uint32_t)round * 0x9E3779B9u; }
static inline __attribute__((always_inline)) uint32_t round_key1(uint64_t seed, int round) { return (uint32_t)(seed >> 32) + (uint32_t)round * 0xBB67AE85u; }

static inline void philox_one(uint32_t c[4], uint64_t seed) {
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t p0 = multiplier0 * c[0], p1 = multiplier1 * c[2];
        const uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ round_key0(seed, round);
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ round_key1(seed, round);
        c[3] = (uint32_t)p0;
    }
}

/* Bit i % 32 of word i / 32: column i of `size` is negated. Equal for all operands of a step and layer: see transform.drawn. */
static inline void drawn_signs(uint64_t seed, uint32_t step_operand, uint32_t layer, uint32_t size, uint32_t signs[4]) {
    uint32_t key[4] = {UINT32_MAX, UINT32_MAX, step_operand & ~7u, layer};
    philox_one(key, seed);
    for (uint32_t i = 0; i < size; i++) {
        uint32_t words[4] = {i, 0, 0, 0};
        philox_one(words, (uint64_t)key[0] << 32 | key[1]);
        signs[i / 32] |= (words[0] & 1) << i % 32;
    }
}
#endif
