"""Quantisation of 2-D operands: specs, scales, rounding, transforms, layouts, and the choice of the kernel."""

from fp4train.quantize.layout import (
    HardwareTensor,
    from_torch,
    nvfp4_quantize,
    swizzle_scales,
    to_torch,
    unswizzle_scales,
)
from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import (
    PairQuantizer,
    Quantizer,
    cast_to_representable,
    quantize,
    quantize_dequantize,
    quantizer,
)
from fp4train.quantize.random import RandomKey, random_bits
from fp4train.quantize.rotation import Rotation
from fp4train.quantize.sharded import amax_extent, measure_amax, packed_bytes, requantised, why_not_cut
from fp4train.quantize.spec import Delayed, QuantSpec
from fp4train.quantize.transform import Hadamard

__all__ = [
    "Decoded",
    "Delayed",
    "Hadamard",
    "HardwareTensor",
    "PairQuantizer",
    "QuantSpec",
    "Quantized",
    "Quantizer",
    "RandomKey",
    "Rotation",
    "amax_extent",
    "cast_to_representable",
    "from_torch",
    "measure_amax",
    "nvfp4_quantize",
    "packed_bytes",
    "quantize",
    "quantize_dequantize",
    "quantizer",
    "random_bits",
    "requantised",
    "swizzle_scales",
    "to_torch",
    "unswizzle_scales",
    "why_not_cut",
]
