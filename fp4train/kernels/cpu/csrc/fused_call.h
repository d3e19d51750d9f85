#ifndef FP4_FUSED_CALL_H
#define FP4_FUSED_CALL_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* fused(job, threads, isa): a norm, a gate, a rotation or the gradients of one, packed by Python (`FUSED`); see fused.h. */
PyObject *fused(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
#endif
