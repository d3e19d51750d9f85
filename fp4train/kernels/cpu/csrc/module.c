/* fp4train.kernels.cpu._cpu: runs jobs from packed structs in tiles, without the GIL.
 *
 * Addresses are those of tensors (Tensor.data_ptr()); the Python side keeps the tensors alive and checks shapes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "adamw.h"
#include "fused_call.h"
#include "machine.h"
#include "philox_one.h"
#include "threads.h"

enum { MIN_TILE_ELEMENTS = 1 << 13, MAX_TILE_ELEMENTS = 1 << 17, TILES_A_THREAD = 4 };
enum { WIDEST_STRIP = 2048, PAIR_TOKENS = 128, COLUMN_TILE_ROWS = 256 };
_Static_assert((int)COLUMN_TILE_ROWS <= (int)TILE_ROWS && (int)PAIR_TOKENS <= (int)TILE_COLUMNS, "an amax pass copies its tiles: see is_compacted");
enum { KEPT_BYTES = 1 << 23 }; /* see keep_transformed */

const Kernels *kernels_of(int isa) {
    switch (isa) {
#if defined(__x86_64__)
    case 1: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels_avx2 : NULL;
    case 2:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                   ? &kernels_avx512
                   : NULL;
#endif
    case 0: return &kernels_plain;
    default: return NULL;
    }
}

/* Whether `compact` copies the tiles of a matrix: see input.h. */
static int is_compacted(const Matrix *x) { return x->stride_row == 1 && x->input != INPUT_F16; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A rectangle [rows, cols] cut into tiles, row by row. */
typedef struct {
    int64_t rows, cols, tile_rows, tile_cols;
} Grid;

/* Small tensors are cut into tiles small enough that all threads have work. */
static Grid wide_grid(int64_t rows, int64_t cols, int64_t block_rows, int threads) {
    const int64_t share = rows * cols / ((int64_t)threads * TILES_A_THREAD);
    const int64_t elements = least(most(share, MIN_TILE_ELEMENTS), MAX_TILE_ELEMENTS);
    const int64_t tile_cols = least(ceil_div(cols, WIDEST_STRIP), elements / WIDEST_STRIP) * WIDEST_STRIP;
    return (Grid){rows, cols, most(1, elements / least(cols, tile_cols) / block_rows) * block_rows, tile_cols};
}
static int64_t grid_size(const Grid *g) { return ceil_div(g->rows, g->tile_rows) * ceil_div(g->cols, g->tile_cols); }

typedef struct {
    int64_t row0, row1, col0, col1;
} Rectangle;

static Rectangle tile_of(const Grid *g, int64_t index) {
    const int64_t across = ceil_div(g->cols, g->tile_cols);
    const int64_t row = index / across * g->tile_rows, col = index % across * g->tile_cols;
    return (Rectangle){row, least(row + g->tile_rows, g->rows), col, least(col + g->tile_cols, g->cols)};
}

/* One or two jobs on the same tensor: row-wise on x, column-wise on x.T. The grid lies over x as stored. */
typedef struct {
    const Kernels *kernels;
    Grid grid;
    int threads;
    const Job *rows, *columns;
    AmaxJob *amax_rows, *amax_columns;
    const DecodeJob *decode;
} Call;

/* Distance from this tile to the one that this thread will probably process next. `x` is x.T of the tensor under the grid. */
static int64_t next_tile(const Call *call, const Matrix *x, int64_t index, int direction) {
    const int64_t there = index + direction * call->threads;
    const Rectangle now = tile_of(&call->grid, index), next = tile_of(&call->grid, there);
    if (there < 0 || there >= grid_size(&call->grid)) return 0;
    return ((next.row0 - now.row0) * x->stride_col + (next.col0 - now.col0) * x->stride_row) * (x->input == INPUT_F32 ? 4 : 2);
}

/* From the last tile to the first: the amax pass ran the other way, and the caches still hold the end of x. */
static void quantize_tile(void *context, int64_t position) {
    const Call *call = context;
    const int64_t index = grid_size(&call->grid) - 1 - position;
    const Rectangle t = tile_of(&call->grid, index);
    if (call->rows) call->kernels->quantize_rows(call->rows, t.row0, t.row1, t.col0, t.col1);
    if (call->columns)
        call->kernels->quantize_columns(call->columns, t.col0, t.col1, t.row0, t.row1,
                                        next_tile(call, &call->columns->x, index, -1));
}
static void amax_tile(void *context, int64_t index) {
    const Call *call = context;
    const Rectangle t = tile_of(&call->grid, index);
    if (call->amax_rows) call->kernels->amax_rows(call->amax_rows, t.row0, t.row1, t.col0, t.col1);
    if (call->amax_columns)
        call->kernels->amax_columns(call->amax_columns, t.col0, t.col1, t.row0, t.row1,
                                    next_tile(call, &call->amax_columns->x, index, 1));
}
static void decode_tile(void *context, int64_t index) {
    const Call *call = context;
    const Rectangle t = tile_of(&call->grid, index);
    call->kernels->decode(call->decode, t.row0, t.row1, t.col0, t.col1);
}

/* Both forms of a tile should find x in the cache: 128 tokens by 256 channels (or a strip, if that is wider). */
static Grid grid_for(const Matrix *rows, int64_t block_rows, int64_t block_cols, const Matrix *columns, int threads) {
    if (!columns) return wide_grid(rows->rows, rows->cols, block_rows, threads);
    return (Grid){columns->cols, columns->rows, PAIR_TOKENS, most(COLUMN_TILE_ROWS, rows ? 16 * block_cols : 0)};
}

/* The tiles of up to two calls, one after the other. */
typedef struct {
    Tile tile;
    Call calls[2];
    int count;
} Pass;

static Call *add_call(Pass *pass, const Kernels *kernels, int threads) {
    Call *call = &pass->calls[pass->count++];
    *call = (Call){.kernels = kernels, .threads = threads};
    return call;
}
static int64_t pass_size(const Pass *pass) {
    int64_t size = 0;
    for (int i = 0; i < pass->count; i++) size += grid_size(&pass->calls[i].grid);
    return size;
}
static void pass_tile(Pass *pass, int64_t index) {
    Call *call = pass->calls;
    for (; index >= grid_size(&call->grid); call++) index -= grid_size(&call->grid);
    pass->tile(call, index);
}

/* A job and the memory that it needs besides that of the caller. */
typedef struct {
    Job job;
    int64_t amaxes; /* one, or one per row or tile */
    int64_t decoded_rows; /* of x, before narrow ones are joined */
    int measure, whole, pow2;
    float margin;
    float *amax, *inverse; /* `whole`: the amaxes, and the output for the inverse scales. The job's `amax` then holds the scales */
    float one[2], *many;   /* memory for amaxes that the caller does not want, and for scales */
    void *kept;            /* memory for x after its transform, if that of the values does not serve */
} Form;

/* TypeError if x has no memory of its own, as a tensor that wraps another one. */
static int unpack_form(PyObject *object, Form *form) {
    Py_buffer view;
    PackedJob p;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) return 0;
    const int fits = view.len == (Py_ssize_t)sizeof p;
    if (fits) memcpy(&p, view.buf, sizeof p);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "quantize: a packed job has %zu bytes", sizeof p);
        return 0;
    }
    const PackedScheme *s = &p.scheme;
    const int given = s->whole != EXTENT_NONE, outer = s->amax == EXTENT_OUTER, tiled = s->amax == EXTENT_TILE;
    const int64_t outer_blocks = ceil_div(p.cols, OUTER_COLUMNS), bands = ceil_div(p.rows, most(1, s->amax_rows));
    if (!p.x) {
        PyErr_SetString(PyExc_TypeError, "x has no memory of its own; pass the tensor that holds its data");
        return 0;
    }
    if (p.rows < 1 || p.cols < 1) {
        PyErr_SetString(PyExc_ValueError, "quantize: x has no elements");
        return 0;
    }
    if ((!p.values && !p.codes) || (p.codes && !p.scales) || (given && !p.scales) || (!p.amax && !p.measure && s->amax != EXTENT_NONE && !outer)) {
        PyErr_SetString(PyExc_ValueError, "quantize: an address is missing");
        return 0;
    }
    if (p.input < INPUT_BF16 || p.input > INPUT_F16) {
        PyErr_SetString(PyExc_ValueError, "quantize: x is neither BF16, float32 nor FP16");
        return 0;
    }
    const int64_t wide = s->hadamard ? ceil_div(p.cols, s->hadamard) * s->hadamard : p.cols, packed = is_packed(s->element);
    const int64_t coded = given ? p.cols + (packed && p.cols % 2) : ceil_div(wide, s->block_cols) * s->block_cols;
    static const float largest_of[] = {[INPUT_BF16] = 0x1.fep127f, [INPUT_F32] = FLT_MAX, [INPUT_F16] = 65504.0f};
    form->amaxes = s->amax == EXTENT_ROW ? bands : tiled ? bands * outer_blocks : 1;
    form->decoded_rows = p.rows;
    form->measure = p.measure;
    form->whole = given;
    form->pow2 = s->scale == SCALE_POW2;
    form->margin = s->margin;
    form->amax = outer ? NULL : (float *)p.amax;
    form->inverse = given ? (float *)p.scales : NULL;
    form->many = form->kept = NULL;
    const int64_t floats = form->amaxes * (given + (!p.amax && p.measure));
    float *room = form->one;
    if (floats > 2) room = form->many = malloc(sizeof(float) * (size_t)floats);
    if (!room) {
        PyErr_NoMemory();
        return 0;
    }
    if (!p.amax && p.measure) form->amax = room + (given ? form->amaxes : 0);
    form->job = (Job){
        .x = {(const void *)p.x, p.input, p.rows, p.cols, p.stride_row, p.stride_col},
        .element = s->element,
        .scale = given ? SCALE_GIVEN : s->scale,
        .scale_rounding = s->scale_rounding,
        .formula = s->formula,
        .block_rows = s->block_rows,
        .block_cols = s->block_cols,
        .amax = given ? room : form->amax,
        .amax_stride = tiled ? outer_blocks : s->amax == EXTENT_ROW,
        .amax_rows = s->amax_rows,
        .tiled = tiled,
        .global_decode = (float *)p.decode,
        .outer = outer || tiled,
        .outer_amax = outer ? (float *)p.amax : NULL,
        .outer_stride = outer_blocks,
        .largest = s->largest,
        .bound = s->bound,
        .scale_limit = largest_of[p.input],
        .stochastic = (s->rounding & 255) == STOCHASTIC,
        .away = s->rounding == NEAREST_AWAY,
        .few_bits = s->rounding >> 8,
        .eden = s->rounding == EDEN,
        .row_offset = p.row_offset,
        .col_offset8 = p.col_offset8,
        .step_operand = p.step_operand,
        .layer = p.layer,
        .hadamard = s->hadamard,
        .values = (void *)p.values,
        .values_f32 = s->values_f32,
        .values_stride = wide,
        .codes = (uint8_t *)p.codes,
        .codes_stride = packed ? coded / 2 : coded,
        .code_cols = coded,
        .scales = given || !p.codes ? NULL : (void *)p.scales,
        .scales_stride = given ? 0 : coded / s->block_cols,
        .stream = p.rows * p.cols * 2 >= s->stream_bytes,
    };
    for (int i = 0; i < ROUNDS; i++) {
        form->job.round_keys[i][0] = round_key0(p.seed, i);
        form->job.round_keys[i][1] = round_key1(p.seed, i);
    }
    if (s->draws_signs) drawn_signs(p.seed, p.step_operand, p.layer, (uint32_t)s->hadamard, form->job.signs);
    else for (int i = 0; i < 4; i++) form->job.signs[i] = s->signs;
    return 1;
}

static int works_across(const Job *job) {
    return job->scale == SCALE_HIF4 || job->scale == SCALE_IF4 || job->hadamard || job->formula >= FOUR_OVER_SIX_MAE || (job->x.stride_col != 1 && job->x.stride_row == 1);
}

/* The number of narrow rows to treat as one: a kernel works on strips of sixteen blocks of a row, which narrow rows do not fill. */
static int64_t rows_together(int64_t rows, int64_t cols, int64_t block) {
    int64_t together = 16;
    if (cols % block || cols % (16 * block) == 0 || cols >= 128 * block) return 1;
    while (rows % together) together /= 2;
    return together;
}

static void join_narrow_rows(Job *job) {
    const int64_t cols = job->x.cols, together = rows_together(job->x.rows, cols, job->block_cols);
    if (together == 1 || job->scale == SCALE_GIVEN || job->block_rows != 1 || job->amax_stride) return;
    if (job->x.stride_col != 1 || job->x.stride_row != cols || (job->outer && cols % OUTER_COLUMNS)) return;
    if (job->stochastic) job->own_cols = cols;
    job->x.rows /= together;
    job->x.cols = job->x.stride_row = job->values_stride = job->code_cols = cols * together;
    job->codes_stride *= together;
    job->scales_stride *= together;
    job->outer_stride *= together;
}

/* Let the amax pass of a transformed form write the transform of x, which the quantising pass then reads in place of x: row by
 * row, as a form without a transform. Values of BF16 are rounded where the transform lies. False if x is too large for the
 * caches, or its amax is given, or there is no memory: the quantising pass then transforms x itself. */
static int keep_transformed(Form *form, AmaxJob *amax) {
    Job *const job = &form->job;
    const int64_t wide = ceil_div(job->x.cols, 16) * 16;
    if (job->scale == SCALE_IF4 || !form->measure || job->hadamard != 16 || job->eden || job->outer || job->formula >= FOUR_OVER_SIX_MAE) return 0;
    if (job->x.rows * wide * 2 > KEPT_BYTES) return 0;
    if (job->codes || job->values_f32) form->kept = malloc((size_t)(job->x.rows * wide * 2));
    amax->transformed = job->codes || job->values_f32 ? form->kept : job->values;
    amax->transformed_stride = wide;
    return amax->transformed != NULL;
}

/* What one call of `quantize` runs: the pass of the amaxes that are not given, if there are any, and that of the tiles. */
typedef struct {
    Form forms[2];
    int count;  /* of forms */
    int shared; /* both need the same amax, which is that of the first */
    AmaxJob amax_jobs[2];
    Pass amax, quantize;
    int not_finite;
} Work;

/* Plan the pass of the amaxes: of both forms from one read of a tile where they read x alike, else of each after the other. */
static void plan_amax(Work *work, const Kernels *kernels, int threads) {
    Form *const forms = work->forms;
    const Job *first = &forms[0].job, *second = &forms[1].job;
    work->shared = work->count == 2 && forms[0].measure && forms[1].measure && !first->amax_stride && !second->amax_stride &&
                   !first->hadamard && !second->hadamard;
    for (int i = 0; i < work->count - work->shared; i++) {
        Form *form = &forms[i];
        AmaxJob *amax = &work->amax_jobs[i];
        if (!form->measure) continue;
        memset(form->amax, 0, sizeof(float) * (size_t)form->amaxes);
        *amax = (AmaxJob){.x = form->job.x, .hadamard = form->job.hadamard, .amax = (uint32_t *)form->amax,
                          .amax_stride = form->job.amax_stride, .amax_rows = form->job.amax_rows, .tiled = form->job.tiled};
        memcpy(amax->signs, form->job.signs, sizeof amax->signs);
        const int across = form->job.hadamard || form->job.x.stride_col != 1;
        Call *call = work->amax.calls;
        if (!work->amax.count || !across || call->amax_columns || call->amax_rows->x.cols != amax->x.rows)
            call = add_call(&work->amax, kernels, threads);
        *(across ? &call->amax_columns : &call->amax_rows) = amax;
    }
    for (int i = 0; i < work->amax.count; i++) {
        Call *call = &work->amax.calls[i];
        AmaxJob *rows = call->amax_rows, *columns = call->amax_columns;
        call->grid = grid_for(rows ? &rows->x : NULL, 1, 16, columns ? &columns->x : NULL, threads);
        if (!rows || !columns || rows->amax_stride || !is_compacted(&columns->x)) continue;
        columns->plain = rows->amax; /* from the copy that the columns are read from */
        call->amax_rows = NULL;
    }
}

/* Plan the pass of the tiles: those of each form after the other, or of both from one read of each. */
static void plan_quantize(Work *work, int at_once, const Kernels *kernels, int threads) {
    for (int i = 0; i < work->count; i++) {
        Form *form = &work->forms[i];
        Job *job = &form->job;
        Call *call = at_once && i ? work->quantize.calls : add_call(&work->quantize, kernels, threads);
        if (!at_once && works_across(job) && keep_transformed(form, &work->amax_jobs[i])) {
            const int64_t wide = work->amax_jobs[i].transformed_stride;
            job->x = (Matrix){work->amax_jobs[i].transformed, INPUT_BF16, job->x.rows, wide, wide, 1};
            job->hadamard = 0;
            join_narrow_rows(job);
        }
        *((at_once ? i : works_across(job)) ? &call->columns : &call->rows) = job;
    }
    for (int i = 0; i < work->quantize.count; i++) {
        Call *call = &work->quantize.calls[i];
        const Job *rows = call->rows, *columns = call->columns;
        call->grid = grid_for(rows ? &rows->x : NULL, rows ? rows->block_rows : 1, rows ? rows->block_cols : 16,
                              columns ? &columns->x : NULL, threads);
    }
}

/* FP8 with one scale for the tensor or each row: scale = (largest / amax) / 2^margin; see scaling.scales_float. */
static void scale_whole(Form *form) {
    for (int64_t i = 0; i < form->amaxes; i++) {
        const float amax = form->amax[i];
        float scale = form->job.largest / amax / form->margin;
        if (scale > FLT_MAX) scale = form->job.scale_limit;
        if (form->pow2) {
            uint32_t bits;
            memcpy(&bits, &scale, sizeof bits);
            bits &= 0x7f800000;
            memcpy(&scale, &bits, sizeof bits);
        }
        if (amax == 0) scale = 1;
        if (!(amax <= FLT_MAX)) *form->job.not_finite = 1;
        form->job.amax[i] = scale;
        form->inverse[i] = 1 / scale;
    }
}

/* Between the passes: what needs the amaxes of the whole tensor. */
static void take_amaxes(void *context) {
    Work *work = context;
    if (work->shared) *work->forms[1].amax = *work->forms[0].amax;
    for (int i = 0; i < work->count; i++)
        if (work->forms[i].whole) scale_whole(&work->forms[i]);
}

static void amax_pass(void *context, int64_t index) { pass_tile(&((Work *)context)->amax, index); }
static void quantize_pass(void *context, int64_t index) {
    Work *work = context;
    if (!__atomic_load_n(&work->not_finite, __ATOMIC_RELAXED)) pass_tile(&work->quantize, index);
}

/* 1 / S_enc of `count` rows, `rows` of which share an amax, or of the tensor. */
static void write_global_decode(const float *amaxes, float *out, int64_t count, int64_t rows, float bound) {
    for (int64_t i = 0; i < count; i++) {
        const float amax = amaxes[i / rows];
        float encode = bound / amax;
        if (encode > FLT_MAX) encode = FLT_MAX;
        if (amax == 0) encode = 1;
        if (!(amax <= FLT_MAX)) encode = NAN;
        out[i] = 1 / encode;
    }
}

const Kernels *machine_of(PyObject *const *arguments, int *threads) {
    const long count = PyLong_AsLong(arguments[0]), isa = PyLong_AsLong(arguments[1]);
    if ((count == -1 || isa == -1) && PyErr_Occurred()) return NULL;
    const Kernels *kernels = kernels_of((int)isa);
    if (!kernels) PyErr_SetString(PyExc_ValueError, "this CPU lacks the instruction set");
    *threads = (int)count;
    return kernels;
}

PyDoc_STRVAR(quantize_doc, "quantize(job, column_job, at_once, threads, isa) -> bool\n\n"
                           "Run a packed job; if column_job is not None, a job of x and one of x.T, from one read of each\n"
                           "tile where at_once: the first is row-wise then, the second column-wise.\n"
                           "True if x has a NaN or an infinity: the outputs are then undefined.");
static PyObject *quantize(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Work work = {.count = 1, .amax.tile = amax_tile, .quantize.tile = quantize_tile};
    int threads;
    (void)self;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "quantize takes 5 arguments, not %zd", count);
    const int both = arguments[1] != Py_None, at_once = both && arguments[2] == Py_True;
    const Kernels *kernels = machine_of(arguments + 3, &threads);
    if (!kernels || !unpack_form(arguments[0], &work.forms[0])) return NULL;
    if (both && !unpack_form(arguments[1], &work.forms[1])) {
        free(work.forms[0].many);
        return NULL;
    }
    work.count += both;
    for (int i = 0; i < work.count; i++) {
        work.forms[i].job.not_finite = &work.not_finite;
        if (!at_once && !works_across(&work.forms[i].job)) join_narrow_rows(&work.forms[i].job);
    }
    plan_amax(&work, kernels, threads);
    plan_quantize(&work, at_once, kernels, threads);
    const Phase phases[2] = {{amax_pass, &work, pass_size(&work.amax), take_amaxes}, {quantize_pass, &work, pass_size(&work.quantize), NULL}};
    const int measures = work.amax.count > 0;
    if (!measures) take_amaxes(&work);
    Py_BEGIN_ALLOW_THREADS;
    run_phases(phases + !measures, 1 + measures, threads);
    Py_END_ALLOW_THREADS;
    for (Form *form = work.forms; form < work.forms + work.count; form++) {
        const int64_t rows = form->job.amax_rows, count = form->job.amax_stride ? form->decoded_rows : 1;
        if (form->job.global_decode) write_global_decode(form->amax, form->job.global_decode, count, rows, form->job.bound);
        free(form->many);
        free(form->kept);
    }
    return PyBool_FromLong(work.not_finite);
}

static void join_narrow_coded_rows(DecodeJob *job) {
    const int64_t cols = job->cols, together = rows_together(job->rows, cols, job->block_cols);
    if (together == 1 || job->scale == SCALE_GIVEN || job->block_rows != 1) return;
    if (job->code_cols != cols || job->codes_stride != (is_packed(job->element) ? cols / 2 : cols)) return;
    if (job->scales_stride != cols / job->block_cols || (job->outer_amax && (cols % OUTER_COLUMNS || job->amax_rows > 1))) return;
    job->rows /= together;
    job->cols = job->code_cols = job->values_stride = cols * together;
    job->codes_stride *= together;
    job->scales_stride *= together;
    job->outer_stride *= together;
}

PyDoc_STRVAR(decode_doc, "decode(job, threads, isa): run a packed job");
static PyObject *decode(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer view;
    PackedDecode p;
    int threads;
    (void)self;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "decode takes 3 arguments, not %zd", count);
    const Kernels *kernels = machine_of(arguments + 1, &threads);
    if (!kernels || PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    const int fits = view.len == (Py_ssize_t)sizeof p;
    if (fits) memcpy(&p, view.buf, sizeof p);
    PyBuffer_Release(&view);
    if (!fits) return PyErr_Format(PyExc_ValueError, "decode: a packed job has %zu bytes", sizeof p);
    const PackedScheme *s = &p.scheme;
    const int given = s->whole != EXTENT_NONE, outer = s->amax == EXTENT_OUTER || s->amax == EXTENT_TILE;
    if (!p.codes || !p.values || (!given && !p.scales) || (!outer && !p.amax != !p.decode)) {
        PyErr_SetString(PyExc_TypeError, "codes and scales have no memory of their own; pass the tensors that hold their data");
        return NULL;
    }
    DecodeJob job = {
        .element = s->element,
        .scale = given ? SCALE_GIVEN : s->scale,
        .rows = p.rows,
        .cols = p.cols,
        .block_rows = s->block_rows,
        .block_cols = s->block_cols,
        .codes = (const uint8_t *)p.codes,
        .codes_stride = p.codes_stride,
        .code_cols = p.code_bytes * (is_packed(s->element) ? 2 : 1),
        .scales = given ? NULL : (const void *)p.scales,
        .scales_stride = given ? 0 : p.scales_stride,
        .outer_amax = outer ? (const float *)p.amax : NULL,
        .outer_stride = ceil_div(p.cols, OUTER_COLUMNS),
        .amax_rows = s->amax_rows,
        .bound = s->bound,
        .largest = s->largest,
        .values = (void *)p.values,
        .values_f32 = s->values_f32,
        .values_stride = p.cols,
        .stream = p.rows * p.cols * (s->values_f32 ? 4 : 2) >= s->stream_bytes,
    };
    join_narrow_coded_rows(&job);
    Call call = {.kernels = kernels, .decode = &job};
    call.grid = wide_grid(job.rows, job.cols, 1, threads);
    const Phase phase = {decode_tile, &call, grid_size(&call.grid), NULL};
    Py_BEGIN_ALLOW_THREADS;
    run_phases(&phase, 1, threads);
    Py_END_ALLOW_THREADS;
    if (p.decode) write_global_decode((const float *)p.amax, (float *)p.decode, p.amaxes, s->amax_rows, s->bound);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(has_isa_doc, "has_isa(isa) -> bool: 0 plain C, 1 AVX2 and FMA, 2 AVX-512 (F, BW, VL, DQ)");
static PyObject *has_isa(PyObject *self, PyObject *argument) {
    const long isa = PyLong_AsLong(argument);
    (void)self;
    if (isa == -1 && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(kernels_of((int)isa) != NULL);
}

PyDoc_STRVAR(thread_pool_doc, "thread_pool() -> str: the threads that run the kernels");
static PyObject *pool_name(PyObject *self, PyObject *nothing) {
    (void)self;
    (void)nothing;
    return PyUnicode_FromString(thread_pool());
}

static PyMethodDef methods[] = {
    {"quantize", (PyCFunction)(void (*)(void))quantize, METH_FASTCALL, quantize_doc},
    {"decode", (PyCFunction)(void (*)(void))decode, METH_FASTCALL, decode_doc},
    {"adamw", (PyCFunction)(void (*)(void))adamw, METH_FASTCALL, "adamw(job, threads): run a packed job"},
    {"fused", (PyCFunction)(void (*)(void))fused, METH_FASTCALL, "fused(job, threads, isa): run a packed job"},
    {"has_isa", has_isa, METH_O, has_isa_doc},
    {"thread_pool", pool_name, METH_NOARGS, thread_pool_doc},
    {NULL, NULL, 0, NULL},
};

/* `layout`: (LAYOUT, bytes of a packed job, of a packed decode job, of a packed fused job), which must equal those of Python. */
static int add_layout(PyObject *module) {
    PyObject *layout = Py_BuildValue("(innn)", LAYOUT, (Py_ssize_t)sizeof(PackedJob), (Py_ssize_t)sizeof(PackedDecode), (Py_ssize_t)sizeof(PackedFused));
    const int failed = !layout || PyModule_AddObjectRef(module, "layout", layout) < 0 || PyModule_AddIntConstant(module, "version", VERSION) < 0;
    Py_XDECREF(layout);
    return failed ? -1 : 0;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_layout}, {0, NULL}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_cpu", .m_size = 0, .m_methods = methods, .m_slots = slots};
PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&module); }
