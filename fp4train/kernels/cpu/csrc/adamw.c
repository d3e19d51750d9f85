#include "adamw.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "philox_one.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx2", "default"))) /* of the same bits: no product is contracted */
#else
#define CLONES
#endif

enum { STRIP = 512 }; /* columns that a thread takes at a time */

/* Packed by Python: `STEP`. Column c has the bits of lane (c + skip) % 8 of counter col8 + (c + skip) / 8. */
typedef struct {
    uint64_t weight, gradient, first, second; /* addresses: float32, float32, BF16, BF16, all [rows, cols] */
    int64_t rows, cols, skip;
    uint32_t row_offset, col8, step_operand, layers[2];
    float keep, size, correction, divisor, beta1, rest1, beta2, rest2, eps;
} Step;

static inline float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t rounded(float x, uint16_t random) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + random) >> 16);
}

/* The bits of all lanes of the counters that the strip needs; the first `skip` are not its own. The loops over counters are
 * inside those over rounds: so they are vectorised. */
static inline __attribute__((always_inline)) void draw(const Step *s, uint32_t layer, int64_t row, uint32_t group, int groups, uint16_t *bits) {
    uint32_t c[4][STRIP / 8 + 1];
    for (int i = 0; i < groups; i++) {
        c[0][i] = group + (uint32_t)i;
        c[1][i] = (uint32_t)row + s->row_offset;
        c[2][i] = s->step_operand;
        c[3][i] = layer;
    }
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t key0 = round_key0(0, round), key1 = round_key1(0, round);
        for (int i = 0; i < groups; i++) {
            const uint64_t p0 = multiplier0 * c[0][i], p1 = multiplier1 * c[2][i];
            c[0][i] = (uint32_t)(p1 >> 32) ^ c[1][i] ^ key0;
            c[2][i] = (uint32_t)(p0 >> 32) ^ c[3][i] ^ key1;
            c[1][i] = (uint32_t)p1;
            c[3][i] = (uint32_t)p0;
        }
    }
    for (int i = 0; i < groups; i++)
        for (int lane = 0; lane < 8; lane++) bits[8 * i + lane] = (uint16_t)(c[lane / 2][i] >> 16 * (lane & 1));
}

CLONES static void strip(void *context, int64_t index) {
    const Step s = *(const Step *)context;
    const int64_t strips = (s.cols + STRIP - 1) / STRIP, row = index / strips, start = index % strips * STRIP;
    const int n = (int)(s.cols - start < STRIP ? s.cols - start : STRIP), skip = (int)s.skip;
    const int groups = (skip + n + 7) / 8;
    uint16_t bits[2][STRIP + 16];
    for (int i = 0; i < 2; i++) draw(&s, s.layers[i], row, s.col8 + (uint32_t)(start / 8), groups, bits[i]);
    const int64_t at = row * s.cols + start;
    float *restrict weight = (float *)(uintptr_t)s.weight + at;
    const float *restrict gradient = (const float *)(uintptr_t)s.gradient + at;
    uint16_t *restrict first = (uint16_t *)(uintptr_t)s.first + at, *restrict second = (uint16_t *)(uintptr_t)s.second + at;
    const uint16_t *restrict random1 = bits[0] + skip, *restrict random2 = bits[1] + skip;
    for (int i = 0; i < n; i++) {
        const float g = gradient[i] / s.divisor;
        const float m = from_bf16(first[i]) * s.beta1 + g * s.rest1;
        const float v = from_bf16(second[i]) * s.beta2 + (g * g) * s.rest2;
        weight[i] = weight[i] * s.keep - s.size * (m / (sqrtf(v) / s.correction + s.eps));
        first[i] = rounded(m, random1[i]);
        second[i] = rounded(v, random2[i]);
    }
}

PyObject *adamw(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer view;
    Step step;
    (void)self;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "adamw takes 2 arguments, not %zd", count);
    const long threads = PyLong_AsLong(arguments[1]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    if (PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    const int fits = view.len == (Py_ssize_t)sizeof step;
    if (fits) memcpy(&step, view.buf, sizeof step);
    PyBuffer_Release(&view);
    if (!fits) return PyErr_Format(PyExc_ValueError, "adamw: a packed job has %zu bytes", sizeof step);
    if (!step.weight || !step.gradient || !step.first || !step.second) {
        PyErr_SetString(PyExc_TypeError, "weights, gradients or moments have no memory of their own");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    const Phase phase = {strip, &step, step.rows * ((step.cols + STRIP - 1) / STRIP), NULL};
    run_phases(&phase, 1, (int)threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
