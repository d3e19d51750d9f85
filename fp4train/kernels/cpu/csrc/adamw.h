/* One step of AdamW with moments in BF16: the formulas of optim/rounded.py. */
#ifndef FP4_ADAMW_H
#define FP4_ADAMW_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* adamw(job, threads): run a packed job */
PyObject *adamw(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
#endif
