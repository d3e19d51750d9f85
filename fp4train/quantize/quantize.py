"""The public entry: quantize a 2-D tensor by the fastest implementation that can, all equal to the bit."""

from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import quantizer
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec


def quantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None, kernel: str = "auto"
) -> Quantized:
    """Codes and scales of x.

    x_RC: [R, C], float32, BF16 or FP16, any strides; other shapes and dtypes raise ValueError, tensors without memory
        of their own (DTensor, FakeTensor, meta) TypeError. Blocks run along C, so `quantize(x.T, spec)` is the
        column-wise form.
    key: which random bits, for stochastic rounding.
    amax: the global (tensor or row) amax, where it is known from elsewhere: reduced over ranks, or from delayed
        scaling's history; after the Hadamard transform.
    kernel: auto, reference, cpu, triton.

    NaN or infinity in x makes every value that shares a scale with it NaN.
    """
    return quantizer(spec, x_RC.device.type, kernel).codes(x_RC, key, amax)


def quantize_dequantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None, kernel: str = "auto"
) -> Decoded:
    """`quantize(...).decoded()` to the bit, in one pass: what emulation multiplies."""
    return quantizer(spec, x_RC.device.type, kernel).values(x_RC, key, amax)
