/* The last two arguments of a call from Python. */
#ifndef FP4_MACHINE_H
#define FP4_MACHINE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "job.h"

/* The kernels of two arguments: threads, instruction set. NULL with an exception: no numbers, or not of this CPU. In module.c. */
const Kernels *machine_of(PyObject *const *arguments, int *threads);
#endif
