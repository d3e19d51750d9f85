"""Quantisation of 2-D operands: specs, scales, rounding, transforms, layouts, and the choice of the
kernel.
"""

from fp4train.quantize.launch import Launch
from fp4train.quantize.layout import (
    tiled_scales,
    to_torch,
)
from fp4train.quantize.quantized import Decoded, Quantized, turned
from fp4train.quantize.quantizer import (
    PairQuantizer,
    Quantizer,
    quantize,
    quantize_dequantize,
    quantizer,
    tensor_of,
)
from fp4train.quantize.random import (
    FPROP_W,
    FPROP_X,
    INITIAL,
    LANES,
    Position,
    RandomKey,
    RunStep,
    philox4x32,
    random_bits,
    random_words,
)
from fp4train.quantize.registering import register
from fp4train.quantize.rotation import Rotation, Transform
from fp4train.quantize.rounding import (
    FEW_BITS,
    ROUNDINGS,
    Nearest,
    Rounding,
    corrected_scales,
    round_to_codes,
    round_to_values,
)
from fp4train.quantize.scaling import (
    block_scales_two_level,
    delayed_amax,
    global_scales,
    initial_delayed_amax,
    macro_codes,
    swizzle_scales,
    unswizzle_scales,
)
from fp4train.quantize.sharded import (
    amax_extent,
    divided_tensors,
    has_tensor_amax,
    joined,
    measure_amax,
    packed_bytes,
    quantised_in_runs,
    requantised,
    stacked,
    why_not_cut,
)
from fp4train.quantize.source import (
    High,
    Operand,
    Own,
    Requantised,
    ValuesOf,
)
from fp4train.quantize.spec import Delayed, QuantSpec
from fp4train.quantize.transform import (
    Hadamard,
    apply_hadamard,
    hadamard_signs,
    undo_transform,
)
from fp4train.quantize.triton import (
    TritonQuantizer,
    has_pair_kernel,
)
from fp4train.quantize.triton_variant import Variant
