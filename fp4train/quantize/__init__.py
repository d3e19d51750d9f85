"""Quantisation of 2-D operands: specs, scales, rounding, transforms, layouts, and the choice among kernels."""

from fp4train.quantize.forms import Form, both_operands, operand, operand_and_codes
from fp4train.quantize.layout import (
    HardwareTensor,
    from_torch,
    nvfp4_quantize,
    swizzle_scales,
    to_torch,
    unswizzle_scales,
)
from fp4train.quantize.quantize import quantize, quantize_dequantize
from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import PairQuantizer, Quantizer, quantizer
from fp4train.quantize.random import RandomKey, random_bits
from fp4train.quantize.representable import cast_to_representable
from fp4train.quantize.rotation import Rotation
from fp4train.quantize.spec import Delayed, QuantSpec
from fp4train.quantize.transform import Hadamard

__all__ = [
    "Decoded",
    "Delayed",
    "Form",
    "Hadamard",
    "HardwareTensor",
    "PairQuantizer",
    "QuantSpec",
    "Quantized",
    "Quantizer",
    "RandomKey",
    "Rotation",
    "both_operands",
    "cast_to_representable",
    "from_torch",
    "nvfp4_quantize",
    "operand",
    "operand_and_codes",
    "quantize",
    "quantize_dequantize",
    "quantizer",
    "random_bits",
    "swizzle_scales",
    "to_torch",
    "unswizzle_scales",
]
