"""Exact casts and maxima that keep NaN.

BF16 -> float32 is a shift of the bits: exact for subnormals too, and free in SASS. float32 -> BF16 is the hardware's
cast (nearest even), or, where HARDWARE is False (the interpreter, which rounds ties upwards), the same in integers.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def as_float(x):
    """BF16, FP16 or float32 -> float32, exact."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def as_bf16(x, HARDWARE: tl.constexpr):
    """float32 -> BF16, to nearest, ties to even; NaN stays NaN."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x != x, 0x7FFF, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def largest(a, b):
    """max(a, b), NaN if either is: one instruction (max.NaN.f32) on SM 8.0."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_eight(x):
    """Largest |x| over the last axis of [A, G, 8] -> [A, G]; the eight lie in one thread."""
    a, b = tl.split(tl.reshape(tl.abs(x), (x.shape[0], x.shape[1], 4, 2)))
    a, b = tl.split(tl.reshape(largest(a, b), (x.shape[0], x.shape[1], 2, 2)))
    a, b = tl.split(largest(a, b))
    return largest(a, b)


@triton.jit
def largest_along(x, AXIS: tl.constexpr):
    """Largest of magnitudes x >= 0 along AXIS. As integers they order like floats, with NaN above infinity."""
    return tl.max(x.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)
