/* Column-wise quantisation: x.T of a row-major tensor, whose rows are adjacent in memory and whose blocks are not.
 *
 * A lane is a row of x.T, a vector is one of its columns (a token): the maximum over a block, the Hadamard transform and the
 * rounding work lane by lane, and sixteen rows share one vector of scales. Only the result is transposed, after it has
 * shrunk: eight E2M1 codes, four bytes or two BF16 values of a lane are first packed into 32 bits. Results of CHUNK tokens are
 * collected before they are written, so that rows get whole cache lines.
 */
#ifndef FP4_COLWISE_H
#define FP4_COLWISE_H
#include "group.h"

enum { MAX_COLUMN_BLOCK = 32 };

typedef struct {
    uint8_t values[16][4 * CHUNK] __attribute__((aligned(64)));
    uint8_t codes[16][CHUNK] __attribute__((aligned(64)));
    int32_t scales[CHUNK / 16][16];
} Columns;

/* Compile-time constants. */
typedef struct {
    int nvfp4; /* see is_nvfp4 */
    int wide, stochastic, hadamard, values, codes;
    int group; /* see group.h */
    int e2m1;  /* the element, whatever the scales */
    int levels; /* HiF4: four columns have a scale */
    int grids;  /* IF4: a lane's block is of integers or of E2M1 */
} ColumnVariant;

INLINE Rounded round_to(const Job *job, F t, I random, Element e, int stochastic) {
    return stochastic ? round_drawn(t, random, e, job->few_bits) : round_plainly(t, e, job->away);
}

/* IF4: integers times 6/7 in the lanes that `marked` names, E2M1 in the others. */
INLINE Rounded round_on_grid(const Job *job, F t, I random, K marked, int stochastic) {
    const F of_integers = f_mul(t, f_set(if4_inverse));
    const int usual = !job->away && !job->few_bits;
    Rounded floats, integers;
    if (usual && stochastic) {
        floats = round_stochastic_e2m1(t, random);
        integers = round_stochastic_integer(of_integers, random);
    } else if (usual) {
        floats = round_nearest_e2m1(t, 1);
        integers = round_nearest_integer(of_integers);
    } else {
        floats = round_to(job, t, random, element_of(E2M1), stochastic);
        integers = round_to(job, of_integers, random, element_of(IF4_INTEGERS), stochastic);
    }
    return (Rounded){i_pick(marked, integers.code, floats.code),
                     f_pick(marked, f_mul(integers.value, f_set(if4_step)), floats.value)};
}

/* Round sixteen columns to the grid. Two BF16 values, or eight or four codes, fill one word of a lane. */
INLINE void round_tile(const Job *job, const F *x, const Scale *scales, const I *random, int64_t at, Columns *out,
                       ColumnVariant v) {
    const int e2m1 = v.nvfp4 || v.e2m1;
    const Element e = element_of(e2m1 ? E2M1 : job->element);
    const int packed = e2m1 || is_packed(job->element), positive_zero = v.nvfp4 || scale_has_mantissa(job->scale);
    const int f32 = !v.nvfp4 && job->values_f32, exact = v.nvfp4 || f32 || exact_in_bf16(job->element, job->scale, job->outer);
    const K marked = i_gt(v.grids ? scales->stored : i_set(0), i_set(0x7f));
    I values[16], codes[4] = {i_set(0), i_set(0), i_set(0), i_set(0)};
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        const Scale *scale = v.levels ? scales + i / 4 : scales;
        F t0 = f_mul(x[i], scale->encode), t1 = f_mul(x[i + 1], scale->encode);
        Rounded even, odd;
        if (positive_zero) t0 = f_add(t0, f_set(0.0f)), t1 = f_add(t1, f_set(0.0f)); /* -0 is coded as 0 */
        if (v.grids) {
            const I words = v.stochastic ? random[i / 2] : i_set(0);
            even = round_on_grid(job, t0, random_low(words), marked, v.stochastic);
            odd = round_on_grid(job, t1, random_high(words), marked, v.stochastic);
        } else if (v.stochastic) {
            const I low = random_low(random[i / 2]), high = random_high(random[i / 2]);
            even = e2m1 ? round_stochastic_e2m1(t0, low) : round_drawn(t0, low, e, job->few_bits);
            odd = e2m1 ? round_stochastic_e2m1(t1, high) : round_drawn(t1, high, e, job->few_bits);
        } else {
            even = e2m1 ? round_nearest_e2m1(t0, v.codes) : round_plainly(t0, e, job->away);
            odd = e2m1 ? round_nearest_e2m1(t1, v.codes) : round_plainly(t1, e, job->away);
        }
        if (v.values) {
            const F y0 = f_mul(even.value, scale->decode), y1 = f_mul(odd.value, scale->decode);
            const I bits0 = exact ? i_bits(y0) : round_to_bf16(y0), bits1 = exact ? i_bits(y1) : round_to_bf16(y1);
            if (f32) values[i] = bits0, values[i + 1] = bits1;
            else values[i / 2] = i_upper_halves(bits0, bits1);
        }
        if (v.codes && packed) {
            const I byte = i_or(even.code, i_shl(odd.code, 4));
            codes[i / 8] = i_or(codes[i / 8], i_shl(byte, 4 * (i & 6)));
        } else if (v.codes) {
            const I pair = i_or(even.code, i_shl(odd.code, 8));
            codes[i / 4] = i_or(codes[i / 4], i_shl(pair, 8 * (i & 2)));
        }
    }
    if (v.values && f32) {
        i_store_columns(values, 8, out->values[0] + 4 * at, sizeof out->values[0]);
        i_store_columns(values + 8, 8, out->values[0] + 4 * at + 32, sizeof out->values[0]);
    } else if (v.values) {
        i_store_columns(values, 8, out->values[0] + 2 * at, sizeof out->values[0]);
    }
    if (v.codes && packed) i_store_columns(codes, 2, out->codes[0] + at / 2, sizeof out->codes[0]);
    else if (v.codes) i_store_columns(codes, 4, out->codes[0] + at, sizeof out->codes[0]);
}

/* A block of sixteen or thirty-two columns of sixteen rows. */
typedef struct {
    F x[MAX_COLUMN_BLOCK];
    Scale scale;
} Block;

/* Load and transform a block. Returns its maxima, as float bits. */
INLINE I load_block(const Job *job, int64_t row, int64_t col, int inside, const Signs *signs, Block *block, ColumnVariant v) {
    const int tiles = v.nvfp4 ? 1 : (int)(job->block_cols / 16);
    I largest = i_set(0);
    for (int j = 0; j < tiles; j++) {
        F tile[16];
        load_columns(&job->x, row, col + 16 * j, v.wide, inside, v.hadamard, tile);
        /* the padding to blocks is added after the transform, without signs */
        if (v.hadamard && (v.nvfp4 || col + 16 * j < job->x.cols)) hadamard_16(tile, signs);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            largest = i_max(largest, magnitude_bits(tile[i]));
            block->x[16 * j + i] = tile[i];
        }
    }
    return largest;
}

INLINE void prepare_block(const Job *job, int64_t row, int64_t col, Global global, int inside, const Signs *signs,
                          Block *block, ColumnVariant v) {
    block->scale = block_scale(job, load_block(job, row, col, inside, signs, block, v), global, 0);
}

/* `at`: the position of the block in the chunk. */
INLINE void round_block(const Job *job, int64_t row, int64_t col, int64_t at, const F *x, const Scale *scale, const Scale *parts,
                        Columns *out, ColumnVariant v) {
    const int tiles = v.nvfp4 ? 1 : (int)(job->block_cols / 16);
    I random[8];
    i_store(out->scales[whole_blocks(at, job->block_cols)], scale->stored);
    for (int j = 0; j < tiles; j++) {
        if (v.stochastic) random_columns_16(job, row, col + 16 * j, random);
        round_tile(job, x + 16 * j, v.levels ? parts + 4 * j : scale, random, at + 16 * j, out, v);
    }
}

INLINE void copy_out(char *to, const uint8_t *from, int64_t bytes, int stream) {
    if (!stream || ((uintptr_t)to & 63) || (bytes & 63)) {
        copy_bytes(to, from, bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += 64) stream_line(to + i, from + i);
}

/* Write the rows of the chunk to the tensors: `cols` values, and `coded` codes, which include the padding to blocks. */
INLINE void flush_columns(const Job *job, int64_t row, int64_t col, int64_t cols, int64_t coded, const Columns *out) {
    const int64_t value_size = job->values_f32 ? 4 : 2, block = job->block_cols;
    const int packed = is_packed(job->element);
    const int bytes = scale_is_byte(job->scale);
    uint8_t scales[16][8];
    if (job->scales && bytes) {
        I words[2];
        for (int k = 0; k < 2; k++) {
            const int32_t(*b)[16] = out->scales + 4 * k;
            words[k] = i_or(i_or(i_load(b[0]), i_shl(i_load(b[1]), 8)), i_or(i_shl(i_load(b[2]), 16), i_shl(i_load(b[3]), 24)));
        }
        i_store_columns(words, 2, scales[0], sizeof scales[0]);
    }
    const int64_t codes = job->code_cols - col < CHUNK ? job->code_cols - col : CHUNK;
    const int64_t rows = job->x.rows - row < 16 ? job->x.rows - row : 16;
    for (int64_t n = 0; n < rows; n++) {
        if (job->values)
            copy_out((char *)job->values + ((row + n) * job->values_stride + col) * value_size, out->values[n],
                     cols * value_size, job->stream);
        if (job->codes)
            copy_out((char *)job->codes + (row + n) * job->codes_stride + (packed ? col / 2 : col), out->codes[n],
                     packed ? codes / 2 : codes, job->stream);
        if (!job->scales || (n && job->block_rows > 1)) continue;
        const int64_t blocks = whole_blocks(coded, block);
        const int64_t at = band_of(row + n, job->block_rows) * job->scales_stride + whole_blocks(col, block);
        if (bytes && blocks == CHUNK / 16) memcpy((uint8_t *)job->scales + at, scales[n], CHUNK / 16);
        else if (bytes) copy_rest((uint8_t *)job->scales + at, scales[n], blocks);
        else for (int64_t b = 0; b < blocks; b++) ((int32_t *)job->scales)[at + b] = out->scales[b][n];
    }
}

INLINE void columns_with(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead,
                         ColumnVariant v) {
    const int64_t block = job->block_cols;
    const int64_t size = job->hadamard ? job->hadamard : 1, width = (job->x.cols + size - 1) / size * size; /* the transform fills the padding */
    const int64_t padded = (width + block - 1) / block * block;
    const int64_t end = col1 < job->x.cols ? col1 : padded, real = col1 < job->x.cols ? col1 : width;
    Columns out;
    Block blocks[2];
    uint8_t scratch[4 * SCRATCH_STRIDE * TILE_COLUMNS] __attribute__((aligned(64)));
    Job local = *job;
    const Matrix *x = &job->x;
    const Signs signs = signs_of(job->signs[0]);
    Group group;
    float group_signs[MAX_HADAMARD];
    if (v.group && job->hadamard) signs_of_group(job->signs, job->hadamard, group_signs);
    F given = f_set(row_amax(job, row0));
    Global global = row_scale(job, given);
    I largest = i_set(0);
    local.x = compact(x, row0, row1, col0, col1, v.wide, scratch, &largest);
    job = &local;
    for (int64_t row = row0; row < row1; row += 16) {
        const int inside = columns_inside(&job->x, row);
        prefetch_ahead(x, row0, row1, col0, col1, v.wide, ahead, (row - row0) / 16, (row1 - row0 + 15) / 16);
        if (job->amax_stride && !job->tiled) {
            float lanes[16];
            for (int n = 0; n < 16; n++) lanes[n] = row_amax(job, row + n < job->x.rows ? row + n : row);
            given = f_load(lanes);
            global = row_scale(job, given);
        }
        for (int64_t col = col0; col < end; col += CHUNK) {
            const int64_t coded = end - col < CHUNK ? end - col : CHUNK;
            if (v.group) {
                scale_group(job, row, col, coded, given, global, v.wide, inside, group_signs, &group);
                for (int64_t at = 0, i = 0; at < coded; at += block, i++)
                    round_block(job, row, col + at, at, group.x + at, &group.scales[i], group.parts + at / 4, &out, v);
            } else {
                prepare_block(job, row, col, global, inside, &signs, &blocks[0], v);
                for (int64_t at = 0, i = 0; at < coded; at += block, i ^= 1) { /* one ahead: see rowwise_bf16.h */
                    if (at + block < coded) prepare_block(job, row, col + at + block, global, inside, &signs, &blocks[i ^ 1], v);
                    round_block(job, row, col + at, at, blocks[i].x, &blocks[i].scale, NULL, &out, v);
                }
            }
            flush_columns(job, row, col, real - col < CHUNK ? real - col : CHUNK, coded, &out);
        }
    }
    if (job->stream) stream_fence();
}

/* Each variant is a function of its own. Where one function held all of them, GCC 12 allocated registers worse: the variants of
 * NVFP4 were 2 to 4 % slower, and every new variant changed the others. */
#define VARIANT(name, ...)                                                                                             \
    NOINLINE void name(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead) {        \
        columns_with(job, row0, row1, col0, col1, ahead, (ColumnVariant){__VA_ARGS__});                                \
    }
VARIANT(columns_nvfp4_values, 1, 0, 0, 0, 1, 0)
VARIANT(columns_nvfp4_codes, 1, 0, 0, 0, 0, 1)
VARIANT(columns_nvfp4_hadamard_values, 1, 0, 0, 1, 1, 0)
VARIANT(columns_nvfp4_hadamard_codes, 1, 0, 0, 1, 0, 1)
VARIANT(columns_nvfp4_stochastic_values, 1, 0, 1, 0, 1, 0)
VARIANT(columns_nvfp4_stochastic_codes, 1, 0, 1, 0, 0, 1)
VARIANT(columns_nvfp4_stochastic_hadamard_values, 1, 0, 1, 1, 1, 0)
VARIANT(columns_nvfp4_stochastic_hadamard_codes, 1, 0, 1, 1, 0, 1)
VARIANT(columns_bf16, 0, 0, 0, job->hadamard != 0, job->values != NULL, job->codes != NULL)
VARIANT(columns_bf16_stochastic, 0, 0, 1, job->hadamard != 0, job->values != NULL, job->codes != NULL)
VARIANT(columns_wide, 0, 1, 0, job->hadamard != 0, job->values != NULL, job->codes != NULL)
VARIANT(columns_wide_stochastic, 0, 1, 1, job->hadamard != 0, job->values != NULL, job->codes != NULL)
#define GROUPS(name, stochastic, e2m1) \
    VARIANT(name, 0, job->x.input != INPUT_BF16, stochastic, 0, job->values != NULL, job->codes != NULL, 1, e2m1)
GROUPS(groups_any, 0, 0)
GROUPS(groups_any_stochastic, 1, 0)
GROUPS(groups_e2m1, 0, 1)
GROUPS(groups_e2m1_stochastic, 1, 1)
#undef GROUPS
#define LEVELS(name, stochastic, levels, grids) \
    VARIANT(name, 0, job->x.input != INPUT_BF16, stochastic, 0, job->values != NULL, job->codes != NULL, 1, 0, levels, grids)
LEVELS(groups_hif4, 0, 1, 0)
LEVELS(groups_hif4_stochastic, 1, 1, 0)
LEVELS(groups_if4, 0, 0, 1)
LEVELS(groups_if4_stochastic, 1, 0, 1)
#undef LEVELS
#undef VARIANT

static void FN(quantize_columns)(const Job *job, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead) {
    static void (*const nvfp4[2][2][2])(const Job *, int64_t, int64_t, int64_t, int64_t, int64_t) = {
        /* stochastic, Hadamard, codes */
        {{columns_nvfp4_values, columns_nvfp4_codes}, {columns_nvfp4_hadamard_values, columns_nvfp4_hadamard_codes}},
        {{columns_nvfp4_stochastic_values, columns_nvfp4_stochastic_codes},
         {columns_nvfp4_stochastic_hadamard_values, columns_nvfp4_stochastic_hadamard_codes}}};
    static void (*const groups[2][2])(const Job *, int64_t, int64_t, int64_t, int64_t, int64_t) = {
        /* stochastic, E2M1 */
        {groups_any, groups_e2m1}, {groups_any_stochastic, groups_e2m1_stochastic}};
    const int wide = job->x.input != INPUT_BF16, s = job->stochastic != 0, codes = job->codes != NULL;
    if (job->scale == SCALE_HIF4) (s ? groups_hif4_stochastic : groups_hif4)(job, row0, row1, col0, col1, ahead);
    else if (job->scale == SCALE_IF4) (s ? groups_if4_stochastic : groups_if4)(job, row0, row1, col0, col1, ahead);
    else if (job->outer || job->hadamard > 16 || job->eden || is_four_over_six(job))
        groups[s][job->element == E2M1 && !job->few_bits && !job->away](job, row0, row1, col0, col1, ahead);
    else if (!wide && is_nvfp4(job) && codes != (job->values != NULL))
        nvfp4[s][job->hadamard != 0][codes](job, row0, row1, col0, col1, ahead);
    else if (wide) (s ? columns_wide_stochastic : columns_wide)(job, row0, row1, col0, col1, ahead);
    else (s ? columns_bf16_stochastic : columns_bf16)(job, row0, row1, col0, col1, ahead);
}
#endif
