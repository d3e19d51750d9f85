#include "fused_call.h"

#include <string.h>

#include "machine.h"
#include "threads.h"

enum { TILE_ELEMENTS = 1 << 14 };
static const int tensors_of[] = {
    [FUSED_NORM] = 4,           [FUSED_NORM_GRADIENTS] = 6, [FUSED_GATE] = 3,
    [FUSED_GATE_GRADIENTS] = 5, [FUSED_ROTATION] = 4,       [FUSED_ROTATION_GRADIENTS] = 4};
enum { KINDS = sizeof tensors_of / sizeof *tensors_of };

typedef struct {
    const Kernels *kernels;
    Fused job;
    int64_t tile_rows;
} FusedCall;

static void fused_tile(void *context, int64_t index) {
    const FusedCall *call = context;
    const int64_t row0 = index * call->tile_rows, row1 = row0 + call->tile_rows;
    call->kernels->fused(&call->job, row0, row1 < call->job.rows ? row1 : call->job.rows);
}

static int fits(const PackedFused *p) {
    const int norm = p->kind == FUSED_NORM || p->kind == FUSED_NORM_GRADIENTS;
    const int rotation = p->kind == FUSED_ROTATION || p->kind == FUSED_ROTATION_GRADIENTS;
    if (p->kind < 0 || p->kind >= KINDS || p->rows < 1 || p->cols < 1 || (norm && p->wide)) return 0;
    return rotation ? p->cols % 64 == 0 && p->heads > 0 && p->time > 0 : p->cols % 32 == 0;
}

PyObject *fused(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer view;
    PackedFused p;
    int threads;
    (void)self;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "fused takes 3 arguments, not %zd", count);
    FusedCall call = {.kernels = machine_of(arguments + 1, &threads)};
    if (!call.kernels || PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    const int whole = view.len == (Py_ssize_t)sizeof p;
    if (whole) memcpy(&p, view.buf, sizeof p);
    PyBuffer_Release(&view);
    if (!whole || !fits(&p)) {
        PyErr_SetString(PyExc_ValueError, "fused: a job of another size, kind, dtype or shape");
        return NULL;
    }
    call.job = (Fused){
        .kind = p.kind, .wide = p.wide, .eps = p.eps, .heads = p.heads, .time = p.time, .rows = p.rows, .cols = p.cols};
    for (int i = 0; i < tensors_of[p.kind]; i++) {
        call.job.at[i] = (void *)(uintptr_t)p.at[i];
        if (call.job.at[i]) continue;
        PyErr_SetString(PyExc_TypeError, "fused: a tensor has no memory of its own");
        return NULL;
    }
    call.tile_rows = p.cols < TILE_ELEMENTS ? TILE_ELEMENTS / p.cols : 1;
    const Phase phase = {fused_tile, &call, (p.rows + call.tile_rows - 1) / call.tile_rows, NULL};
    Py_BEGIN_ALLOW_THREADS
    run_phases(&phase, 1, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
