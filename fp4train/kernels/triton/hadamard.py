"""Hadamard transform of neighbours that one thread holds: y = (x * d) H / sqrt(n), as
`quantize.transform.apply_hadamard`.

x is a tuple of N tensors, neighbour i in place i; groups of SIZE are transformed. x is rounded to BF16 first; the
butterfly runs in float32 in the order of strides 1, 2, 4, ... ((a, b) -> (a+b, a-b)); the scaled result is rounded
to BF16.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108  (Triton has no starred tuples)

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_bf16, as_float


@triton.jit
def transform(
    x, N: tl.constexpr, SIZE: tl.constexpr, NEGATIVE: tl.constexpr, FACTOR: tl.constexpr, HARDWARE: tl.constexpr
):
    """Tuple of N float32 tensors -> tuple of N float32 tensors on the BF16 grid. Bit i of NEGATIVE: the sign d_i is
    -1. FACTOR: 1/sqrt(SIZE)."""
    y = ()
    for i in tl.static_range(N):
        v = as_float(as_bf16(x[i], HARDWARE))
        if (NEGATIVE >> (i % SIZE)) & 1:
            v = -v
        y = y + (v,)
    for level in tl.static_range(8):
        if (1 << level) < SIZE:
            z = ()
            for i in tl.static_range(N):
                if (i >> level) & 1:
                    z = z + (y[i ^ (1 << level)] - y[i],)
                else:
                    z = z + (y[i] + y[i ^ (1 << level)],)
            y = z
    z = ()
    for i in tl.static_range(N):
        z = z + (as_float(as_bf16(y[i] * FACTOR, HARDWARE)),)
    return z
