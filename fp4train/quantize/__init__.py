"""Quantisation of 2-D operands: specs, scales, rounding, transforms, layouts, and the choice of the
kernel.
"""

from fp4train.quantize.layout import nvfp4_quantize as nvfp4_quantize
from fp4train.quantize.layout import tiled_scales as tiled_scales
from fp4train.quantize.layout import to_torch as to_torch
from fp4train.quantize.position import Position as Position
from fp4train.quantize.position import RunStep as RunStep
from fp4train.quantize.quantized import Decoded as Decoded
from fp4train.quantize.quantized import Quantized as Quantized
from fp4train.quantize.quantizer import PairQuantizer as PairQuantizer
from fp4train.quantize.quantizer import Quantizer as Quantizer
from fp4train.quantize.quantizer import cast_to_representable as cast_to_representable
from fp4train.quantize.quantizer import quantize as quantize
from fp4train.quantize.quantizer import quantize_dequantize as quantize_dequantize
from fp4train.quantize.quantizer import quantizer as quantizer
from fp4train.quantize.random import RandomKey as RandomKey
from fp4train.quantize.random import random_bits as random_bits
from fp4train.quantize.registering import register as register
from fp4train.quantize.rotation import Rotation as Rotation
from fp4train.quantize.rotation import Transform as Transform
from fp4train.quantize.rounding import ROUNDINGS as ROUNDINGS
from fp4train.quantize.rounding import Rounding as Rounding
from fp4train.quantize.scaling import swizzle_scales as swizzle_scales
from fp4train.quantize.scaling import unswizzle_scales as unswizzle_scales
from fp4train.quantize.sharded import amax_extent as amax_extent
from fp4train.quantize.sharded import has_tensor_amax as has_tensor_amax
from fp4train.quantize.sharded import measure_amax as measure_amax
from fp4train.quantize.sharded import packed_bytes as packed_bytes
from fp4train.quantize.sharded import quantised_in_runs as quantised_in_runs
from fp4train.quantize.sharded import requantised as requantised
from fp4train.quantize.sharded import stacked as stacked
from fp4train.quantize.sharded import why_not_cut as why_not_cut
from fp4train.quantize.source import High as High
from fp4train.quantize.source import Operand as Operand
from fp4train.quantize.source import Own as Own
from fp4train.quantize.source import Requantised as Requantised
from fp4train.quantize.source import ValuesOf as ValuesOf
from fp4train.quantize.spec import Delayed as Delayed
from fp4train.quantize.spec import QuantSpec as QuantSpec
from fp4train.quantize.transform import Hadamard as Hadamard
