"""The readable quantiser in plain torch: the oracle that every kernel must match in every bit.

quantize(x): x -> [Hadamard] -> block amax -> scales -> t = x * encode scale -> codes.
quantize_dequantize(x): the same up to t, then values on the grid times the block scale, never
materialising codes.

Layout: [R, C], any strides, seen as [R/br, br, C/bc, bc] after zero padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.formats import AdaptiveScale, LevelledScale, pack_fp4
from fp4train.quantize import scaling
from fp4train.quantize.quantized import Decoded, Quantized, finish_operand
from fp4train.quantize.random import RandomKey, random_bits
from fp4train.quantize.rounding import corrected_scales, round_to_codes, round_to_values
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard, pad_columns, transform


@dataclass(frozen=True)
class Scaled:
    """A scaled tensor before rounding: t [Rb, br, Cb, bc] float32, and its scales, stored and as
    float32 factors [Rb, Cb].
    """

    t: Tensor
    stored: Tensor
    decode: Tensor
    amax: Tensor | None
    # the factor applied to the product: S_dec, or the scale_inv of a tensor or row
    outer: Tensor | None


def to_blocks(x_RC: Tensor, spec: QuantSpec) -> Tensor:
    """[R, C] -> [Rb, br, Cb, bc], zero-padded to whole blocks; an extent of None becomes one block
    of at least one row or column.
    """
    rows, cols = x_RC.shape
    br, bc = (extent or max(size, 1) for extent, size in zip(spec.block, (rows, cols), strict=True))
    if spec.block[1] is None and spec.format.packed:
        bc += bc % 2  # two codes per byte
    if spec.block[1] or cols % bc:
        x_RC = pad_columns(x_RC, bc)
    if missing := (-rows % br if rows or spec.block[0] else br):
        x_RC = F.pad(x_RC, (0, 0, 0, missing))
    if spec.block[1] is None and cols == 0:
        x_RC = F.pad(x_RC, (0, bc))
    rows, cols = x_RC.shape
    return x_RC.reshape(rows // br, br, cols // bc, bc)


def scale_tensor(
    x_RC: Tensor, spec: QuantSpec, amax: Tensor | None, key: RandomKey | None
) -> Scaled:
    """Everything before the elements are rounded."""
    dtype = x_RC.dtype
    if spec.requantises is not None:
        x_RC = quantize(x_RC.T, spec.requantises).restore(torch.bfloat16).T
    if spec.hadamard is not None:
        x_RC = transform(x_RC, spec.hadamard, key)
    x_blocks = to_blocks(x_RC, spec)
    amax_b = x_blocks.abs().amax(dim=(1, 3)).to(torch.float32)  # [Rb, Cb]
    x_blocks = x_blocks.to(torch.float32)
    fmt = spec.scale_format
    if isinstance(fmt, LevelledScale):
        stored, encode = fmt.of_blocks(x_blocks)
        t = x_blocks.reshape(len(x_blocks), 1, encode.shape[1], fmt.group) * _spread(encode)
        return Scaled(t, stored, fmt.factors(stored), None, None)
    if spec.global_scale is not None:
        return _scale_two_level(x_blocks, amax_b, spec, amax, key)
    if fmt.roundings:
        mode = spec.scale_rounding or fmt.roundings[0]
        stored = scaling.block_scales_e8m0(amax_b, spec.format, mode)
        encode = scaling.encode_scales_e8m0(stored, mode) * spec.guard
        t = x_blocks * _spread(encode)
        return Scaled(t, stored, fmt.decode(stored), None, scaling.product_factor(spec, t.device))
    if fmt.is_byte:
        stored = scaling.block_scales(amax_b, spec)
        decode = fmt.decode(stored)
        t = (x_blocks * _spread(scaling.encode_factor(decode))).add_(0.0)  # as below
        return Scaled(t, stored, decode, None, None)
    if amax is None:
        used = amax_b
    else:
        used = amax.to(torch.float32).reshape(-1, 1).expand_as(amax_b)
    margin = spec.delayed.margin if spec.delayed else 0
    # no code can say NaN: the scale does, for all that share it
    if amax is not None and not spec.format.has_nan:
        used = torch.where(amax_b.isfinite(), used, torch.nan)
    scale, scale_inv = scaling.scales_float(used, spec.format, fmt, dtype, margin=margin)
    t = x_blocks * _spread(scale)
    # a given amax may be smaller than max|x|: saturate larger values, but keep infinities
    if amax is not None:
        t = torch.where(x_blocks.isfinite(), t, torch.nan)
    if not spec.has_outer_scale:
        return Scaled(t, scale_inv, scale_inv, None, None)
    if spec.block[0] is None:
        return Scaled(t, scale_inv, scale_inv, used.reshape(()), scale_inv.reshape(()))
    return Scaled(t, scale_inv, scale_inv, used, scale_inv)


def _scale_chunks(
    x_blocks: Tensor, amax_b: Tensor, spec: QuantSpec, amax: Tensor | None, key: RandomKey | None
) -> Scaled:
    inner = _scale_two_level(x_blocks, amax_b, spec.of_chunks, None, key)
    assert inner.amax is not None
    stored, amax = scaling.out_of_chunks(inner.stored, inner.amax, spec, amax)
    decode = scaling.spread_outer(scaling.global_scales(amax, spec)[1], amax_b.shape, spec)
    return Scaled(inner.t, stored, spec.scale_format.decode(stored), amax, decode)


def _scale_two_level(
    x_blocks: Tensor, amax_b: Tensor, spec: QuantSpec, amax: Tensor | None, key: RandomKey | None
) -> Scaled:
    if spec.chunks is not None:
        return _scale_chunks(x_blocks, amax_b, spec, amax, key)
    if amax is not None:
        if spec.global_scale == "row":
            amax = amax.to(torch.float32).reshape(-1, 1)
        else:
            amax = amax.to(torch.float32).reshape(())
    else:
        amax = scaling.outer_amax(amax_b, spec)
    encode, decode = (
        scaling.spread_outer(scale, amax_b.shape, spec)
        for scale in scaling.global_scales(amax, spec)
    )
    if spec.scale_format.roundings:
        return _scale_macro(x_blocks, amax_b, encode, decode, amax, spec)
    factor = None
    if spec.four_over_six is not None:
        stored = scaling.choose_scales(x_blocks, amax_b, amax, encode, decode, spec)
    elif spec.formula == "encode_centric":
        stored, factor = scaling.encode_centric(amax_b, encode, spec)
    else:
        stored = scaling.block_scales_two_level(amax_b, encode, spec)
    if isinstance(spec.scale_format, AdaptiveScale):
        stored = scaling.choose_grids(x_blocks, stored, amax, decode, spec)
    scale = spec.scale_format.decode(stored)
    if factor is None:
        factor = scaling.encode_factor(scale * decode)
    # + 0.0: a negative zero is coded as zero, as in TE
    t = (x_blocks * _spread(factor)).add_(0.0)
    if spec.rounding == "eden" and isinstance(spec.hadamard, Hadamard):
        t = torch.where(_spread(scale == 0), 0.0, t)
        bits = _random_bits(t, spec, key)[:, 0, :, 0]  # those of the first element of a block
        stored = corrected_scales(t, scale, spec.format, spec.hadamard.size, bits)
        scale = spec.scale_format.decode(stored)
    if spec.outer is not None:
        return Scaled(t, stored, scale * decode, amax, None)
    return Scaled(t, stored, scale, amax, decode)


def _scale_macro(
    x_blocks: Tensor,
    amax_b: Tensor,
    mantissa: Tensor,
    inverse: Tensor,
    amax: Tensor,
    spec: QuantSpec,
) -> Scaled:
    """E8M0 scales of x times the mantissas of its macro-blocks; both of the latter are [Rb, Cb]."""
    mode = spec.scale_rounding or spec.scale_format.roundings[0]
    scaled_amax = (amax_b * mantissa).clamp(max=scaling.FLOAT32_MAX)
    stored = scaling.block_scales_e8m0(scaled_amax, spec.format, mode)
    t = x_blocks * _spread(scaling.encode_scales_e8m0(stored, mode) * mantissa)
    return Scaled(t, stored, spec.scale_format.decode(stored) * inverse, amax, None)


def _spread(per_block: Tensor) -> Tensor:
    """[Rb, Cb] -> [Rb, 1, Cb, 1], to broadcast with [Rb, br, Cb, bc]."""
    return per_block[:, None, :, None]


def _on_grids(
    rounded: Callable[..., Tensor], scaled: Scaled, spec: QuantSpec, key: RandomKey | None
) -> Tensor:
    """Codes or values of the scaled elements, as `rounded` makes them; of blocks of integers, where
    the scales choose the grid, codes or multiples of their step.
    """
    t = scaled.t
    bits = _bits(t, spec, key)
    elements = rounded(t, spec.format, bits, spec.rounder)
    fmt = spec.scale_format
    if not isinstance(fmt, AdaptiveScale):
        return elements
    integers = rounded(t * (1.0 / fmt.step), fmt.other, bits, spec.rounder)
    if integers.is_floating_point():
        integers.mul_(fmt.step)
    return torch.where(_spread(fmt.marked(scaled.stored)), integers, elements)


def _bits(t: Tensor, spec: QuantSpec, key: RandomKey | None) -> Tensor | None:
    if spec.random and spec.rounding != "eden":
        return _random_bits(t, spec, key)
    return None


def _random_bits(t: Tensor, spec: QuantSpec, key: RandomKey | None) -> Tensor:
    if key is None:
        raise ValueError(
            f"key=None: rounding={spec.rounding!r} takes its bits from a RandomKey(seed=, "
            "step=, layer=, operand=)"
        )
    rows = t.shape[0] * t.shape[1]
    cols = t.shape[2] * t.shape[3]
    return random_bits(key, rows, cols, t.device).reshape(t.shape)


def quantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> Quantized:
    """Codes and scales of x [R, C] (BF16, FP16 or float32; any strides). See
    `fp4train.quantize.quantize`.
    """
    scaled = scale_tensor(x_RC, spec, amax, key)
    rows, cols = x_RC.shape
    t = scaled.t
    codes = _on_grids(round_to_codes, scaled, spec, key)
    codes = codes.reshape(t.shape[0] * t.shape[1], t.shape[2] * t.shape[3])[:rows]
    codes = pack_fp4(codes) if spec.format.packed else codes
    return Quantized(spec, (rows, cols), codes, scaled.stored, scaled.amax)


def quantize_dequantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> Decoded:
    """Equals `quantize(...).decoded()` in every bit, without making codes."""
    scaled = scale_tensor(x_RC, spec, amax, key)
    t = scaled.t
    values = _on_grids(round_to_values, scaled, spec, key)
    if not spec.has_outer_scale:
        values.mul_(_spread(scaled.decode))
    values = values.reshape(t.shape[0] * t.shape[1], t.shape[2] * t.shape[3])
    rows, cols = x_RC.shape
    return finish_operand(values, scaled.outer, spec, (rows, cols))
