"""Quantisation of 2-D operands: specs, scales, rounding, transforms, layouts, and the choice of the
kernel.
"""

from fp4train.quantize.launch import Launch as Launch
from fp4train.quantize.layout import (
    tiled_scales as tiled_scales,
    to_torch as to_torch,
)
from fp4train.quantize.quantized import Decoded as Decoded, Quantized as Quantized, turned as turned
from fp4train.quantize.quantizer import (
    PairQuantizer as PairQuantizer,
    Quantizer as Quantizer,
    quantize as quantize,
    quantize_dequantize as quantize_dequantize,
    quantizer as quantizer,
    tensor_of as tensor_of,
)
from fp4train.quantize.random import (
    FPROP_W as FPROP_W,
    FPROP_X as FPROP_X,
    INITIAL as INITIAL,
    LANES as LANES,
    Position as Position,
    RandomKey as RandomKey,
    RunStep as RunStep,
    philox4x32 as philox4x32,
    random_bits as random_bits,
    random_words as random_words,
)
from fp4train.quantize.registering import register as register
from fp4train.quantize.rotation import Rotation as Rotation, Transform as Transform
from fp4train.quantize.rounding import (
    FEW_BITS as FEW_BITS,
    ROUNDINGS as ROUNDINGS,
    Nearest as Nearest,
    Rounding as Rounding,
    corrected_scales as corrected_scales,
    round_to_codes as round_to_codes,
    round_to_values as round_to_values,
)
from fp4train.quantize.scaling import (
    block_scales_two_level as block_scales_two_level,
    delayed_amax as delayed_amax,
    global_scales as global_scales,
    initial_delayed_amax as initial_delayed_amax,
    macro_codes as macro_codes,
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
from fp4train.quantize.transform import (
    Hadamard as Hadamard,
    apply_hadamard as apply_hadamard,
    hadamard_signs as hadamard_signs,
    undo_transform as undo_transform,
)
from fp4train.quantize.triton import (
    TritonQuantizer as TritonQuantizer,
    has_pair_kernel as has_pair_kernel,
)
from fp4train.quantize.triton_variant import Variant as Variant
