#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif
#include "vec_avx512.h"

#include "all_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int nothing_for_this_processor;
#endif
