#include "vec_plain.h"

#include "all_kernels.h"
