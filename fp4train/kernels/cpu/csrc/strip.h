/* The strip: sixteen blocks of a row (or of a band of block_rows rows), whose scales are one vector.
 *
 * Shared by both row-wise kernels: the positions of the input and output of a strip, and storing its scales. An incomplete strip
 * is computed as a whole in buffers, and the existing part is copied out.
 */
#ifndef FP4_STRIP_H
#define FP4_STRIP_H
#include "input.h"
#include "philox.h"
#include "scale.h"

enum { MAX_BLOCK = 128, MAX_STRIP = 16 * MAX_BLOCK };

typedef struct {
    uint8_t values[4 * MAX_STRIP] __attribute__((aligned(64)));
    uint8_t codes[MAX_STRIP] __attribute__((aligned(64)));
    uint8_t input[4 * MAX_STRIP] __attribute__((aligned(64)));
    uint16_t bits[MAX_STRIP] __attribute__((aligned(64)));
    int32_t scales[16];
    float encode[16], decode[16];
} Strip;

/* The bands and strips of a rectangle, one after the other. */
typedef struct {
    int64_t row, col, rows;
} Place;

INLINE Place first_place(const Job *job, int64_t row0, int64_t row1, int64_t col0) {
    return (Place){row0, col0, row1 - row0 < job->block_rows ? row1 - row0 : job->block_rows};
}
INLINE Place next_place(Place p, const Job *job, int64_t row1, int64_t col0, int64_t col1, int64_t width) {
    if (p.col + width < col1) return (Place){p.row, p.col + width, p.rows};
    return first_place(job, p.row + p.rows, row1, col0);
}

/* The largest lane of each `lanes` (1, 2, 4 or 8) neighbours, in all of them. */
INLINE I i_group_max(I x, int64_t lanes) {
    static const int32_t identity[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int32_t other = 1; other < lanes; other *= 2)
        x = i_max(x, i_bits(f_lanes(f_bits(x), i_xor(i_load(identity), i_set(other)))));
    return x;
}

/* The global scales of a strip with outer blocks, from its maxima. A strip has whole ones, since sixteen blocks are a
 * multiple of OUTER_COLUMNS. */
INLINE Global outer_scale(const Job *job, I largest, int64_t row, int64_t col) {
    if (job->tiled)
        return global_scale(job, tile_amaxes(job->amax, job->amax_stride, job->block_cols, band_of(row, job->amax_rows), col));
    const int64_t blocks = whole_blocks(OUTER_COLUMNS, job->block_cols), first = col / OUTER_COLUMNS;
    const I amax = i_group_max(largest, blocks);
    int32_t lanes[16];
    i_store(lanes, amax);
    for (int64_t i = 0; job->outer_amax && i * blocks < 16 && first + i < job->outer_stride; i++)
        memcpy(job->outer_amax + row * job->outer_stride + first + i, lanes + i * blocks, 4);
    return global_scale(job, f_bits(amax));
}

/* `largest`: the maxima of the strip. `global`: the scale of the tensor or the row. */
INLINE Scale strip_scale(const Job *job, I largest, Global global, int64_t row, int64_t col) {
    if (job->outer) return block_scale(job, largest, outer_scale(job, largest, row, col), 1);
    return block_scale(job, largest, global, 0);
}

INLINE void store_line(void *to, I x, int stream) {
    if (stream) i_stream(to, x);
    else i_store(to, x);
}

/* Output positions of the values and codes of a row. */
typedef struct {
    char *values_at, *codes_at; /* in the tensor; NULL: not wanted */
    char *values, *codes;       /* where they are written first */
    size_t value_bytes, code_bytes;
    int stream; /* the values are whole aligned lines, too large for the caches */
} Target;

INLINE Target target_of(const Job *job, int64_t row, int64_t col, int64_t width, Strip *s) {
    const int64_t valid = job->x.cols - col < width ? job->x.cols - col : width;
    const int64_t coded = job->code_cols - col < width ? job->code_cols - col : width;
    const int64_t size = job->values_f32 ? 4 : 2, packed = is_packed(job->element);
    Target t = {0};
    if (job->values) t.values_at = (char *)job->values + (row * job->values_stride + col) * size;
    if (job->codes) t.codes_at = (char *)job->codes + row * job->codes_stride + (packed ? col / 2 : col);
    t.values = job->values && valid < width ? (char *)s->values : t.values_at;
    t.codes = job->codes && coded < width ? (char *)s->codes : t.codes_at;
    t.value_bytes = (size_t)(valid * size);
    t.code_bytes = (size_t)(packed ? coded / 2 : coded);
    t.stream = job->stream && valid == width && ((uintptr_t)t.values_at & 63) == 0;
    return t;
}

INLINE void finish_target(const Target *t) {
    if (t->values != t->values_at) memcpy(t->values_at, t->values, t->value_bytes);
    if (t->codes != t->codes_at) memcpy(t->codes_at, t->codes, t->code_bytes);
}

INLINE void store_scales(const Job *job, int64_t row, int64_t col, const Scale *scale, Strip *s) {
    const int64_t block = job->block_cols, first = whole_blocks(col, block);
    const int64_t left = whole_blocks(job->x.cols + block - 1, block) - first;
    const int64_t at = band_of(row, job->block_rows) * job->scales_stride + first;
    const size_t count = (size_t)(left < 16 ? left : 16);
    f_store(s->encode, scale->encode);
    f_store(s->decode, scale->decode);
    if (!job->scales || job->scale == SCALE_GIVEN) return;
    if (scale_is_byte(job->scale)) {
        i_store_u8((uint8_t *)s->scales, scale->stored);
        memcpy((uint8_t *)job->scales + at, s->scales, count);
    } else {
        i_store(s->scales, scale->stored);
        memcpy((float *)job->scales + at, s->scales, 4 * count);
    }
}
#endif
