"""Public functions: quantise a 2-D tensor by the fastest implementation that supports it; all are bit-identical."""

from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import quantizer
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec


def quantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None, kernel: str = "auto"
) -> Quantized:
    """Codes and scales of x.

    x_RC: [R, C], float32, BF16 or FP16, any strides. Other shapes and dtypes raise ValueError; tensors without memory
        of their own (DTensor, FakeTensor, meta) raise TypeError. Blocks run along C, so `quantize(x.T, spec)` is the
        column-wise form.
    key: selects the random bits of stochastic rounding.
    amax: the global (tensor or row) amax after the Hadamard transform, if it is not that of x: reduced over ranks, or
        from the history of delayed scaling.
    kernel: auto, reference, cpu, triton.

    NaN or infinity in x makes every value that shares a scale with it NaN.
    """
    return quantizer(spec, x_RC.device.type, kernel).codes(x_RC, key, amax)


def quantize_dequantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None, kernel: str = "auto"
) -> Decoded:
    """Equals `quantize(...).decoded()` in every bit, in one pass: the operand that emulation multiplies."""
    return quantizer(spec, x_RC.device.type, kernel).values(x_RC, key, amax)
