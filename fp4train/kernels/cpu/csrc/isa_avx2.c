#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include "vec_avx2.h"

#include "all_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int nothing_for_this_processor;
#endif
