/* The kernels of one instruction set: included once by each isa_*.c, after its vec_*.h. */
#include "amax.h"
#include "colwise.h"
#include "decode.h"
#include "fused.h"
#include "rowwise.h"

const Kernels FN(kernels) = {FN(quantize_rows), FN(quantize_columns), FN(amax_rows), FN(amax_columns), FN(decode), FN(fused)};
