"""Scales from amax, the float32 operations of `quantize.scaling` in its order. A non-finite amax
makes its scales NaN.

`quantize.triton_variant.Scales.kind` names the way: see there.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from fp4train.kernels.triton.rounding import as_e4m3, of_fp8, snap

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)
SMALLEST_MACRO: tl.constexpr = tl.constexpr(1e-12)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def finite_or_nan(amax):
    """Magnitudes: infinity becomes NaN."""
    return tl.where(amax < float("inf"), amax, float("nan"))


@triton.jit
def outer_amax(amax_ptr, row, block, groups, rows, V: tl.constexpr):
    """The amax of the tensor, of each row in `row`, or of what shares a scale with blocks `block`
    of these rows.
    """
    if V.outer.kind == "tensor":
        return tl.load(amax_ptr)
    elif V.outer.kind == "row":
        return tl.load(amax_ptr + row, mask=row < rows, other=0.0)
    elif V.outer.cols == 0:
        return tl.load(amax_ptr + row // V.outer.rows, mask=row < rows, other=0.0)
    else:
        across = tl.cdiv(groups * V.n, V.outer.cols)
        place = row // V.outer.rows * across + block * V.n // V.outer.cols
        return tl.load(amax_ptr + place, mask=(row < rows) & (block < groups), other=0.0)


@triton.jit
def is_factor(product):
    """Whether a product of scales can be the factor of both: it is a normal number, or NaN."""
    return ((product >= SMALLEST_NORMAL) & (product < float("inf"))) | (product != product)


@triton.jit
def product_factor(scale, other):
    """The one factor of two scales, as cuBLAS takes it; 0 where they have none."""
    product = scale * other
    return tl.where(is_factor(product), product, 0.0)


@triton.jit
def macro_scales(amax, V: tl.constexpr):
    """(Mantissas of macro-blocks, 1 over these): 1 + the upper 8 bits of that of range / amax."""
    amax = tl.where(amax < SMALLEST_MACRO, SMALLEST_MACRO, amax)
    ratio = tl.div_rn(tl.full(amax.shape, V.scale.range, tl.float32), amax).to(
        tl.int32, bitcast=True
    )
    mantissa = 1.0 + ((ratio >> 15) & 0xFF).to(tl.float32) * 2.0**-8
    mantissa = tl.where(amax < float("inf"), mantissa, float("nan"))
    return mantissa, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), mantissa)


@triton.jit
def outer_scales(amax_ptr, decode_ptr, row, group, block, groups, place, rows, V: tl.constexpr):
    """(S_enc, S_dec) of each row in `row`, of the tensor, or of what shares a scale with blocks
    `block` of `groups`: S_enc = bound/amax, 1 where amax = 0, capped at FLT_MAX; S_dec = 1/S_enc,
    which tile 0 of the tensor, or that of `group` 0 of a row, also stores. 1 without a global
    scale; of macro-blocks the mantissas.

    decode_ptr: of S_dec; with V.factor also that of another operand's, and behind S_dec there is
        room for the factor of both.
    """
    s_enc = 1.0
    s_dec = 1.0
    if V.outer.macro:
        s_enc, s_dec = macro_scales(outer_amax(amax_ptr, row, block, groups, rows, V), V)
    elif V.outer.kind != "none":
        amax = finite_or_nan(outer_amax(amax_ptr, row, block, groups, rows, V))
        s_enc = tl.div_rn(tl.full(amax.shape, V.scale.bound, tl.float32), amax)
        s_enc = tl.where(s_enc > FLT_MAX, FLT_MAX, s_enc)
        s_enc = tl.where(amax == 0.0, 1.0, s_enc)
        s_dec = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), s_enc)
        if V.factor:
            own_ptr, other_ptr = decode_ptr
            tl.store(own_ptr, s_dec, mask=place == 0)
            tl.store(own_ptr + 1, product_factor(s_dec, tl.load(other_ptr)), mask=place == 0)
        elif V.outer.kind == "tensor":
            tl.store(decode_ptr, s_dec, mask=place == 0)
        elif V.outer.cols == 0:
            tl.store(decode_ptr + row, s_dec, mask=row < tl.where(group == 0, rows, 0))
    return s_enc, s_dec


@triton.jit
def place_of_scale(row64, group, groups, V: tl.constexpr):
    """The offset of the scale of a block: row after row, or in tiles of 128 rows x 4 columns
    (quantize/layout.py).
    """
    if V.tiled:
        tile = row64 // 128 * tl.cdiv(groups, 4) + group // 4
        return tile * 512 + row64 % 32 * 16 + row64 % 128 // 32 * 4 + group % 4
    else:
        return row64 * groups + group


@triton.jit
def float_scales(amax, V: tl.constexpr):
    """FP8's (scale, scale_inv): scale = (largest/amax) / 2^margin, 1 where amax = 0, `if_infinite`
    where the quotient is infinite.
    """
    scale = (
        tl.div_rn(tl.full(amax.shape, V.element.largest, tl.float32), amax) * V.scale.inverse_margin
    )
    scale = tl.where(scale == float("inf"), V.scale.if_infinite, scale)
    if V.scale.kind == "pow2":
        scale = (scale.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, scale)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    return scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)


@triton.jit
def rounded_scale(exact_scale, V: tl.constexpr):
    """(Bytes, values) of scales >= 0 with a mantissa, to nearest, ties to even, saturating."""
    if V.scale.cast and cuda_capability_geq(8, 9):
        rounded = as_e4m3(exact_scale)
        return rounded.to(tl.uint8, bitcast=True), of_fp8(rounded)
    is_nan = exact_scale != exact_scale
    bits, s = snap(
        tl.minimum(exact_scale, V.scale.largest),
        0.0,
        V.scale.mantissa,
        V.scale.min_exponent,
        V.scale.bits,
        "nearest",
    )
    NAN: tl.constexpr = (1 << V.scale.bits) - 1
    byte = tl.where(is_nan, NAN, (bits + (bits >> (23 - V.scale.mantissa))) & NAN)
    s = tl.where(is_nan, float("nan"), s)
    return byte.to(tl.uint8), s


@triton.jit
def unsigned_scales(amax_b, s_enc, s_dec, V: tl.constexpr):
    """Block scales with a mantissa: (byte, encode factor min(1/(s*S_dec), FLT_MAX), decode factor
    s, or s*S_dec where S_dec is that of part of a row).
    """
    amax_b = finite_or_nan(amax_b)
    if V.scale.kind == "unsigned_divided":
        exact_scale = tl.div_rn(amax_b, tl.full(amax_b.shape, V.scale.range, tl.float32)) * s_enc
    else:
        exact_scale = amax_b * (s_enc * V.scale.inverse_range)
    byte, s = rounded_scale(exact_scale, V)
    encode = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s * s_dec)
    if V.outer.kind == "extent" and V.outer.cols > 0:
        s = s * s_dec
    return byte, tl.where(encode > FLT_MAX, FLT_MAX, encode), s


@triton.jit
def e8m0_decode(byte):
    """2^(byte-127) of bytes held in an int32; NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def e8m0_scales(amax_b, macro, macro_inverse, V: tl.constexpr):
    """MX's block scales: (byte, encode factor 2^(127-byte), decode factor 2^(byte-127)). Byte 0
    encodes with 1 (rceil) or 2^126. The encode factor is multiplied by the guard. Of macro-blocks
    the scales are those of x times their mantissas `macro`, by which and by 1 over which the
    factors are multiplied.
    """
    if V.outer.macro:
        amax_b = amax_b * macro
        amax_b = tl.where(amax_b > FLT_MAX, FLT_MAX, amax_b)
    if V.scale.kind == "e8m0_rceil":
        quotient = tl.div_rn(amax_b, tl.full(amax_b.shape, V.element.largest, tl.float32))
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = bits >> 23
        fraction = bits & 0x7FFFFF
        up = tl.where(exponent == 0, fraction > 0x400000, fraction > 0)
        byte = tl.minimum(exponent + up.to(tl.int32), 254)  # also of an infinite quotient
    else:
        bits = amax_b.to(tl.int32, bitcast=True)
        if V.scale.kind == "e8m0_even":
            bits += 1 << (22 - V.element.mantissa)
        byte = (bits >> 23) & 0xFF
        if V.scale.kind == "e8m0_ceil":
            byte += ((bits & 0x7FFFFF) > 0).to(tl.int32)
        byte = tl.minimum(tl.maximum(byte - V.element.max_exponent, 0), 254)
    byte = tl.where(amax_b < float("inf"), byte, 255)
    ZERO: tl.constexpr = 1.0 if V.scale.kind == "e8m0_rceil" else 2.0**126
    encode = tl.where(byte == 0, ZERO, e8m0_decode(tl.maximum(254 - byte, 0)))
    encode = tl.where(byte == 255, float("nan"), encode)
    stored = byte.to(tl.uint8)
    decode = e8m0_decode(byte)
    if V.scale.guard != 1.0:
        encode = encode * V.scale.guard
    if V.outer.macro:
        encode = encode * macro
        decode = decode * macro_inverse
    return stored, encode, decode


@triton.jit
def block_scales(amax_b, s_enc, s_dec, V: tl.constexpr):
    """(stored scale, encode factor, decode factor) of each block; s_enc and s_dec count for scales
    with a mantissa, and for macro-blocks.
    """
    if V.scale.kind == "unsigned" or V.scale.kind == "unsigned_divided":
        return unsigned_scales(amax_b, s_enc, s_dec, V)
    elif V.scale.kind == "fp32" or V.scale.kind == "pow2":
        scale, inverse = float_scales(amax_b, V)
        return inverse, scale, inverse
    else:
        return e8m0_scales(amax_b, s_enc, s_dec, V)
