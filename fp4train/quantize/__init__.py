"""Quantisation of 2-D operands: specs, scales, rounding, transforms, layouts, and the choice of the
kernel.
"""

from fp4train.quantize.launch import Launch as Launch
from fp4train.quantize.layout import (
    nvfp4_quantize as nvfp4_quantize,
    tiled_scales as tiled_scales,
    to_torch as to_torch,
)
from fp4train.quantize.position import Position as Position, RunStep as RunStep
from fp4train.quantize.quantized import Decoded as Decoded, Quantized as Quantized
from fp4train.quantize.quantizer import (
    PairQuantizer as PairQuantizer,
    Quantizer as Quantizer,
    cast_to_representable as cast_to_representable,
    quantize as quantize,
    quantize_dequantize as quantize_dequantize,
    quantizer as quantizer,
    tensor_of as tensor_of,
)
from fp4train.quantize.random import (
    FPROP_W as FPROP_W,
    FPROP_X as FPROP_X,
    INITIAL as INITIAL,
    RandomKey as RandomKey,
    philox4x32 as philox4x32,
    random_bits as random_bits,
    random_words as random_words,
)
from fp4train.quantize.registering import register as register
from fp4train.quantize.rotation import Rotation as Rotation, Transform as Transform
from fp4train.quantize.rounding import (
    ROUNDINGS as ROUNDINGS,
    Rounding as Rounding,
    round_to_codes as round_to_codes,
    round_to_values as round_to_values,
)
from fp4train.quantize.scaling import (
    delayed_amax as delayed_amax,
    initial_delayed_amax as initial_delayed_amax,
    swizzle_scales as swizzle_scales,
    unswizzle_scales as unswizzle_scales,
)
from fp4train.quantize.sharded import (
    amax_extent as amax_extent,
    divided_tensors as divided_tensors,
    has_tensor_amax as has_tensor_amax,
    joined as joined,
    measure_amax as measure_amax,
    packed_bytes as packed_bytes,
    quantised_in_runs as quantised_in_runs,
    requantised as requantised,
    stacked as stacked,
    why_not_cut as why_not_cut,
)
from fp4train.quantize.source import (
    High as High,
    Operand as Operand,
    Own as Own,
    Requantised as Requantised,
    ValuesOf as ValuesOf,
)
from fp4train.quantize.spec import Delayed as Delayed, QuantSpec as QuantSpec
from fp4train.quantize.transform import Hadamard as Hadamard
