/* Jobs: the arguments of one quantisation, the structs in which Python packs them, and the table of the kernels of one
 * instruction set.
 *
 * x is the tensor whose last axis is blocked: [rows, cols] with any strides (counted in elements). All outputs are
 * row-major in the same orientation, so a column-wise operand is x.T with stride_row == 1 and comes out transposed.
 */
#ifndef FP4_JOB_H
#define FP4_JOB_H
#include <stdint.h>

#include "philox_one.h"

enum { INPUT_BF16, INPUT_F32, INPUT_F16 };
enum { E2M1, E2M3, E3M2, E4M3, E5M2, UE5M3, UE5M3_IEEE }; /* UE5M3 and its IEEE codebook: scales only */
/* Any other element format, without infinity: a number that holds its fields; see element.h. */
enum { OWN_ELEMENT = 1 << 6, OWN_MANTISSA_AT = 8, OWN_BITS_AT = 12, OWN_NAN_AT = 16, OWN_BIAS_AT = 20, OWN_BIAS = 64 };
/* The fields of its number (`element_number` in kernels/cpu/__init__.py). */
static inline int own_mantissa(int element) { return element >> OWN_MANTISSA_AT & 15; }
static inline int own_bits(int element) { return element >> OWN_BITS_AT & 15; }
static inline int own_nan(int element) { return element >> OWN_NAN_AT & 1; }
static inline int own_bias(int element) { return (element >> OWN_BIAS_AT & 255) - OWN_BIAS; }
/* Whether two codes share a byte. */
static inline int is_packed(int element) { return element == E2M1 || (element & OWN_ELEMENT && own_bits(element) <= 4); }
enum { SCALE_E4M3, SCALE_E8M0, SCALE_F32, SCALE_POW2, SCALE_UE5M3, SCALE_UE5M3_IEEE, SCALE_GIVEN, SCALE_HIF4, SCALE_IF4 };
/* IF4: blocks of integers, sign and magnitude, times 6/7: the number of INT4. */
enum { IF4_INTEGERS = OWN_ELEMENT | 2 << OWN_MANTISSA_AT | 4 << OWN_BITS_AT | (OWN_BIAS - 1) << OWN_BIAS_AT };
enum { ROUND_FLOOR, ROUND_RCEIL, ROUND_EVEN, ROUND_CEIL };
enum { FORMULA_TE_2_14, FORMULA_TE_2_13, FORMULA_ENCODE_CENTRIC, FOUR_OVER_SIX_MAE, FOUR_OVER_SIX_MSE };
enum { NEAREST, STOCHASTIC, EDEN, NEAREST_AWAY }; /* STOCHASTIC | n << 8 | middle << 16: with n random bits; see round_few in element.h */
/* EXTENT_ROW: of `amax_rows` whole rows; EXTENT_TILE: of OUTER_COLUMNS columns of `amax_rows` rows. */
enum { EXTENT_NONE, EXTENT_TENSOR, EXTENT_ROW, EXTENT_OUTER, EXTENT_TILE };
enum { TILE_ROWS = 256, TILE_COLUMNS = 128 }; /* the largest rectangle that a kernel copies: see input.h */
enum { OUTER_COLUMNS = 128 }; /* EXTENT_OUTER: columns of a row that share a scale, which multiplies the elements */

typedef struct {
    const void *data;
    int input;
    int64_t rows, cols, stride_row, stride_col;
} Matrix;

typedef struct {
    Matrix x;
    int element, scale, scale_rounding, formula;
    int64_t block_rows, block_cols;
    float *amax; /* of a global scale: the amax, SCALE_GIVEN: the scale, of the tensor (amax_stride 0) or of each row (1) */
    int64_t amax_stride, amax_rows; /* rows that share an amax, where there are several */
    int tiled;                      /* the amaxes are those of tiles, amax_stride of them across; `outer` too then */
    float *global_decode; /* output for 1 / S_enc, one per amax; or NULL */
    int outer;            /* the amaxes are those of outer blocks, which the kernel measures */
    float *outer_amax;    /* output for them, [rows, outer_stride]; or NULL */
    int64_t outer_stride;
    float largest;     /* the magnitude that an amax is scaled to: the largest element, for NVFP4 times the guard */
    float bound;       /* largest value of the global range, 448 * 6; SCALE_E8M0: multiplies the scaled elements */
    float scale_limit; /* SCALE_F32, SCALE_POW2: replaces an infinite scale */
    int stochastic;
    int away;          /* to nearest, ties away from zero */
    int few_bits;      /* stochastic with so few random bits, | 256: by the middles of their steps; 0: all sixteen, and a half */
    uint64_t round_keys[ROUNDS][2]; /* of Philox, in 64 bits, so that vectors are loaded from them */
    uint32_t row_offset, col_offset8, step_operand, layer; /* Philox counter; col_offset8 counts eights of columns */
    int64_t own_cols; /* if a row of x is several rows of the tensor: their width; the counter is that of the tensor. 0: one row */
    int eden;                                              /* correct the scales of each transform: see group.h */
    int hadamard;                                          /* 0, 16, 32, 64 or 128 */
    uint32_t signs[4];                                     /* bit i % 32 of word i / 32: column i of a transform is negated */
    void *values;       /* BF16 or float32 [rows, cols], without the global scale; or NULL */
    int values_f32;
    int64_t values_stride; /* elements */
    uint8_t *codes;     /* [rows, code_cols] bytes, or half as many where two share one; or NULL */
    int64_t codes_stride, code_cols;
    void *scales;       /* bytes or float32, [blocks down, blocks across]; or NULL */
    int64_t scales_stride;
    int stream;         /* write whole lines, bypassing the caches */
    int *not_finite;    /* set to 1 if a block has a NaN or an infinity: the reference must then be used */
} Job;

typedef struct {
    Matrix x;
    int hadamard;
    uint32_t signs[4];
    uint32_t *amax; /* float bits, one for the tensor (stride 0) or one per row (1) or tile; atomic maximum */
    int64_t amax_stride, amax_rows; /* as in a job */
    int tiled;
    uint32_t *plain; /* the same for the whole tensor before the transform; or NULL */
    uint16_t *transformed; /* BF16 [rows, transformed_stride]: output for x after a transform of 16; or NULL */
    int64_t transformed_stride;
} AmaxJob;

/* --- Structs packed by Python with struct ("=": native order, no padding); kernels/cpu/__init__.py documents the fields. A change of a
 * field requires a new LAYOUT in both places: an extension with another layout is refused when it is loaded. --- */
enum { LAYOUT = 4 };
/* Of the numbers that fields can hold, and of the arguments of functions. An extension of another version does not know some. */
enum { VERSION = 9 };
enum { MAX_HADAMARD = 128 };

/* The same for every call of a scheme. */
typedef struct {
    int32_t element, scale, scale_rounding, formula;
    int32_t block_rows, block_cols;
    int32_t whole;      /* extent of the only scale, SCALE_F32 or SCALE_POW2; blocks are then a unit of work */
    int32_t amax;       /* extent of the amax that scales need besides those of blocks */
    int32_t amax_rows, unused;
    int32_t rounding, hadamard;
    uint32_t signs; /* of the first 32 columns of a transform, which repeat */
    int32_t draws_signs; /* the signs are those of the seed, step and layer instead */
    int32_t values_f32;  /* values are written as float32, not as BF16 */
    float largest, bound, margin; /* margin: divisor of `whole` scales */
    int64_t stream_bytes;         /* larger outputs bypass the caches */
} PackedScheme;

typedef struct {
    PackedScheme scheme;
    uint64_t seed;
    uint32_t row_offset, col_offset8, step_operand, layer;
    uint64_t x, values, codes, scales, amax, decode; /* addresses; 0 if not wanted */
    int64_t rows, cols, stride_row, stride_col;
    int32_t input, measure;
} PackedJob;

typedef struct {
    PackedScheme scheme;
    uint64_t codes, scales, values, amax, decode;
    int64_t rows, cols, code_bytes, codes_stride, scales_stride, amaxes;
} PackedDecode;

_Static_assert(sizeof(PackedScheme) == 80 && sizeof(PackedJob) == 80 + 24 + 48 + 32 + 8 && sizeof(PackedDecode) == 80 + 40 + 48,
               "no padding: Python packs none");

typedef struct {
    int element, scale;
    int64_t rows, cols, block_rows, block_cols;
    const uint8_t *codes;
    int64_t codes_stride, code_cols;
    const void *scales;
    int64_t scales_stride;
    const float *outer_amax; /* of outer blocks or tiles, outer_stride across, whose scales multiply the elements; or NULL */
    int64_t outer_stride, amax_rows;
    float bound, largest;
    void *values;
    int values_f32;
    int64_t values_stride;
    int stream;
} DecodeJob;

enum { FUSED_NORM, FUSED_NORM_GRADIENTS, FUSED_GATE, FUSED_GATE_GRADIENTS, FUSED_ROTATION, FUSED_ROTATION_GRADIENTS };
enum { FUSED_TENSORS = 6 };

/* A norm, a gate, a rotation, or the gradients of one; see fused.h. */
typedef struct {
    int kind;
    int wide;  /* tensors of a gate or rotation are float32, not BF16 */
    float eps; /* of a norm */
    int64_t heads, time; /* of a rotation: heads of a token, tokens of a sequence */
    int64_t rows, cols;
    void *at[FUSED_TENSORS]; /* what is read, then what is written */
} Fused;

typedef struct {
    int32_t kind, wide, heads;
    float eps;
    int64_t time, rows, cols;
    uint64_t at[FUSED_TENSORS]; /* addresses */
} PackedFused;
_Static_assert(sizeof(PackedFused) == 16 + 24 + 8 * FUSED_TENSORS, "no padding: Python packs none");

/* `fused` makes the rows [row0, row1) of its job. Every other kernel processes the rectangle [row0, row1) x [col0, col1) of its job;
 * col0 is a multiple of 256 and of the block. ahead: distance in bytes to the next rectangle, which is prefetched meanwhile; 0 for
 * none. */
typedef struct {
    void (*quantize_rows)(const Job *, int64_t row0, int64_t row1, int64_t col0, int64_t col1);
    void (*quantize_columns)(const Job *, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead);
    void (*amax_rows)(const AmaxJob *, int64_t row0, int64_t row1, int64_t col0, int64_t col1);
    void (*amax_columns)(const AmaxJob *, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t ahead);
    void (*decode)(const DecodeJob *, int64_t row0, int64_t row1, int64_t col0, int64_t col1);
    void (*fused)(const Fused *, int64_t row0, int64_t row1);
} Kernels;

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512;

/* Those of an instruction set, 0 plain, 1 AVX2, 2 AVX-512; NULL where this CPU lacks it. */
const Kernels *kernels_of(int isa);
#endif
