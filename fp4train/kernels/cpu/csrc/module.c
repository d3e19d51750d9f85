/* fp4train.kernels.cpu._cpu: jobs from Python tuples, cut into tiles, run without the GIL.
 *
 * Pointers come as integers (Tensor.data_ptr()); the Python side keeps the tensors alive and has checked shapes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <math.h>
#include <string.h>

#include "job.h"
#include "threads.h"

enum { MIN_TILE_ELEMENTS = 1 << 13, MAX_TILE_ELEMENTS = 1 << 17, TILES_A_THREAD = 4 };
enum { WIDEST_STRIP = 2048, PAIR_TOKENS = 128, COLUMN_TILE_ROWS = 256 };

static const Kernels *kernels_of(int isa) {
    switch (isa) {
#if defined(__x86_64__)
    case 1: return __builtin_cpu_supports("avx2") ? &kernels_avx2 : NULL;
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

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A rectangle [rows, cols] cut into tiles, row by row. */
typedef struct {
    int64_t rows, cols, tile_rows, tile_cols;
} Grid;

/* Small tensors are cut small enough for all threads to have their share. */
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
    const AmaxJob *amax_rows, *amax_columns;
    const DecodeJob *decode;
} Call;

/* From this tile to the one that this thread will probably have next. `x` is x.T of the tensor the grid lies over. */
static int64_t next_tile(const Call *call, const Matrix *x, int64_t index, int direction) {
    const int64_t there = index + direction * call->threads;
    const Rectangle now = tile_of(&call->grid, index), next = tile_of(&call->grid, there);
    if (there < 0 || there >= grid_size(&call->grid)) return 0;
    return ((next.row0 - now.row0) * x->stride_col + (next.col0 - now.col0) * x->stride_row) * (x->input == INPUT_F32 ? 4 : 2);
}

/* From the last tile to the first: the amax was taken the other way, and the caches still hold the end of x. */
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

/* Both halves of a tile should find x in the cache: 128 tokens by 256 channels (or a strip, if that is wider). */
static Grid grid_for(const Matrix *rows, int64_t block_rows, int64_t block_cols, const Matrix *columns, int threads) {
    if (!columns) return wide_grid(rows->rows, rows->cols, block_rows, threads);
    return (Grid){columns->cols, columns->rows, PAIR_TOKENS, most(COLUMN_TILE_ROWS, rows ? 16 * block_cols : 0)};
}

static void run(Tile tile, Call *call, int threads) {
    call->threads = threads;
    Py_BEGIN_ALLOW_THREADS;
    run_tiles(tile, call, grid_size(&call->grid), threads);
    Py_END_ALLOW_THREADS;
}

#define MATRIX "KiLLLL" /* data, input, rows, cols, stride_row, stride_col */
#define MATRIX_OF(m) &(m).data, &(m).input, &(m).rows, &(m).cols, &(m).stride_row, &(m).stride_col

static int parse_job(PyObject *tuple, Job *job) {
    return PyArg_ParseTuple(tuple, MATRIX "(iiiiLLffpiI)KLpKf(KIIII)LKpLKLLKLp", MATRIX_OF(job->x), &job->element, &job->scale,
                            &job->scale_rounding, &job->formula, &job->block_rows, &job->block_cols, &job->largest,
                            &job->bound, &job->stochastic, &job->hadamard, &job->signs, &job->amax, &job->amax_stride,
                            &job->measure, &job->global_decode, &job->scale_limit, &job->seed, &job->row_offset,
                            &job->col_offset8, &job->step_operand, &job->layer, &job->own_cols, &job->values,
                            &job->values_f32, &job->values_stride, &job->codes, &job->codes_stride, &job->code_cols,
                            &job->scales, &job->scales_stride, &job->stream);
}

static void run_amax(const Kernels *kernels, const AmaxJob *rows, const AmaxJob *columns, int threads) {
    Call call = {.kernels = kernels, .amax_rows = rows, .amax_columns = columns};
    call.grid = grid_for(rows ? &rows->x : NULL, 1, 16, columns ? &columns->x : NULL, threads);
    run(amax_tile, &call, threads);
}

static int64_t amax_count(const Job *job) { return job->amax_stride ? job->x.rows : 1; }

/* Fills the amax of the jobs that want theirs measured; `unasked` has room for those that nobody asked to see. */
static void measure(const Kernels *kernels, Job *rows, Job *columns, float unasked[2], int threads) {
    Job *const jobs[2] = {rows, columns};
    AmaxJob amax[2];
    const AmaxJob *wanted[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        Job *job = jobs[i];
        if (!job || !job->measure) continue;
        if (!job->amax) job->amax = &unasked[i];
        memset(job->amax, 0, sizeof(float) * (size_t)amax_count(job));
        amax[i] = (AmaxJob){job->x, job->hadamard, job->signs, (uint32_t *)job->amax, job->amax_stride};
        wanted[i] = &amax[i];
    }
    if (wanted[0] || wanted[1]) run_amax(kernels, wanted[0], wanted[1], threads);
}

static void write_global_decode(const float *amax, float *out, int64_t count, float bound) {
    for (int64_t i = 0; i < count; i++) {
        float encode = bound / amax[i];
        if (encode > FLT_MAX) encode = FLT_MAX;
        if (amax[i] == 0) encode = 1;
        if (!(amax[i] <= FLT_MAX)) encode = NAN;
        out[i] = 1 / encode;
    }
}

PyDoc_STRVAR(quantize_doc, "quantize(row_job, column_job, threads, isa) -> bool\n\n"
                           "Either job may be None. True where a NaN or an infinity was met: the outputs are void then.");
static PyObject *quantize(PyObject *self, PyObject *arguments) {
    PyObject *row_tuple, *column_tuple;
    Job jobs[2];
    int threads, isa, not_finite = 0;
    float unasked[2];
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OOii", &row_tuple, &column_tuple, &threads, &isa)) return NULL;
    if (row_tuple != Py_None && !parse_job(row_tuple, &jobs[0])) return NULL;
    if (column_tuple != Py_None && !parse_job(column_tuple, &jobs[1])) return NULL;
    jobs[0].not_finite = jobs[1].not_finite = &not_finite;
    Call call = {.kernels = kernels_of(isa)};
    if (row_tuple != Py_None) call.rows = &jobs[0];
    if (column_tuple != Py_None) call.columns = &jobs[1];
    if (!call.kernels || !(call.rows || call.columns)) {
        PyErr_SetString(PyExc_ValueError, call.kernels ? "quantize: both jobs are None" : "this CPU lacks the instruction set");
        return NULL;
    }
    measure(call.kernels, call.rows ? &jobs[0] : NULL, call.columns ? &jobs[1] : NULL, unasked, threads);
    call.grid = grid_for(call.rows ? &call.rows->x : NULL, call.rows ? call.rows->block_rows : 1,
                         call.rows ? call.rows->block_cols : 16, call.columns ? &call.columns->x : NULL, threads);
    run(quantize_tile, &call, threads);
    for (const Job *job = jobs; job < jobs + 2; job++)
        if ((job == call.rows || job == call.columns) && job->global_decode)
            write_global_decode(job->amax, job->global_decode, amax_count(job), job->bound);
    return PyBool_FromLong(not_finite);
}

static int parse_amax_job(PyObject *tuple, AmaxJob *job) {
    job->hadamard = 0;
    return PyArg_ParseTuple(tuple, MATRIX "KL", MATRIX_OF(job->x), &job->amax, &job->amax_stride);
}

PyDoc_STRVAR(amax_doc, "amax(row_job, column_job, threads, isa)\n\n"
                       "Raises the float32 at each job's pointer to the largest magnitude; either job may be None.");
static PyObject *amax(PyObject *self, PyObject *arguments) {
    PyObject *row_tuple, *column_tuple;
    AmaxJob jobs[2];
    int threads, isa;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OOii", &row_tuple, &column_tuple, &threads, &isa)) return NULL;
    if (row_tuple != Py_None && !parse_amax_job(row_tuple, &jobs[0])) return NULL;
    if (column_tuple != Py_None && !parse_amax_job(column_tuple, &jobs[1])) return NULL;
    const Kernels *kernels = kernels_of(isa);
    const AmaxJob *rows = row_tuple == Py_None ? NULL : &jobs[0], *columns = column_tuple == Py_None ? NULL : &jobs[1];
    if (!kernels || !(rows || columns)) {
        PyErr_SetString(PyExc_ValueError, kernels ? "amax: both jobs are None" : "this CPU lacks the instruction set");
        return NULL;
    }
    run_amax(kernels, rows, columns, threads);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(decode_doc, "decode(job, threads, isa)");
static PyObject *decode(PyObject *self, PyObject *arguments) {
    PyObject *tuple;
    DecodeJob job;
    int threads, isa;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Oii", &tuple, &threads, &isa)) return NULL;
    if (!PyArg_ParseTuple(tuple, "iiLLLLKLLKLKiLi", &job.element, &job.scale, &job.rows, &job.cols, &job.block_rows,
                          &job.block_cols, &job.codes, &job.codes_stride, &job.code_cols, &job.scales, &job.scales_stride, &job.values,
                          &job.values_f32, &job.values_stride, &job.stream))
        return NULL;
    Call call = {.kernels = kernels_of(isa), .decode = &job};
    if (!call.kernels) {
        PyErr_SetString(PyExc_ValueError, "this CPU lacks the instruction set");
        return NULL;
    }
    call.grid = wide_grid(job.rows, job.cols, 1, threads);
    run(decode_tile, &call, threads);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(global_decode_doc, "global_decode(amax, out, count, bound)\n\n"
                                "out = 1 / S_enc, the factor that NVFP4 values lack (see scale.h), of float32 at `amax`.");
static PyObject *global_decode(PyObject *self, PyObject *arguments) {
    const float *amax;
    float *out, bound;
    long long count;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "KKLf", &amax, &out, &count, &bound)) return NULL;
    write_global_decode(amax, out, count, bound);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(has_isa_doc, "has_isa(isa) -> bool: 0 plain C, 1 AVX2, 2 AVX-512 (F, BW, VL, DQ)");
static PyObject *has_isa(PyObject *self, PyObject *argument) {
    const long isa = PyLong_AsLong(argument);
    (void)self;
    if (isa == -1 && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(kernels_of((int)isa) != NULL);
}

PyDoc_STRVAR(thread_pool_doc, "thread_pool() -> str: whose threads run the kernels");
static PyObject *pool_name(PyObject *self, PyObject *nothing) {
    (void)self;
    (void)nothing;
    return PyUnicode_FromString(thread_pool());
}

static PyMethodDef methods[] = {
    {"quantize", quantize, METH_VARARGS, quantize_doc},
    {"amax", amax, METH_VARARGS, amax_doc},
    {"decode", decode, METH_VARARGS, decode_doc},
    {"global_decode", global_decode, METH_VARARGS, global_decode_doc},
    {"has_isa", has_isa, METH_O, has_isa_doc},
    {"thread_pool", pool_name, METH_NOARGS, thread_pool_doc},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_cpu", .m_size = 0, .m_methods = methods};
PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&module); }
