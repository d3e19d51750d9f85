"""Scales from amax, the float32 operations of `quantize.scaling` in its order. A non-finite amax
makes its scales NaN.

`quantize.triton_variant.Variant.scale` names the way: see there.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton.rounding import snap

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def finite_or_nan(amax):
    """Magnitudes: infinity becomes NaN."""
    return tl.where(amax < float("inf"), amax, float("nan"))


@triton.jit
def outer_scales(amax_ptr, decode_ptr, row, group, place, rows, V: tl.constexpr):
    """(S_enc, S_dec) of each row in `row`, or of the tensor: S_enc = bound/amax, 1 where amax = 0,
    capped at FLT_MAX; S_dec = 1/S_enc, which tile 0 of the tensor, or that of `group` 0 of a row,
    also stores. 1 without a global scale.
    """
    s_enc = 1.0
    s_dec = 1.0
    if V.outer != "none":
        amax = (
            tl.load(amax_ptr)
            if V.outer == "tensor"
            else tl.load(amax_ptr + row, mask=row < rows, other=0.0)
        )
        amax = finite_or_nan(amax)
        s_enc = tl.div_rn(tl.full(amax.shape, V.bound, tl.float32), amax)
        s_enc = tl.where(s_enc > FLT_MAX, FLT_MAX, s_enc)
        s_enc = tl.where(amax == 0.0, 1.0, s_enc)
        s_dec = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), s_enc)
        if V.outer == "tensor":
            tl.store(decode_ptr, s_dec, mask=place == 0)
        else:
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
    scale = tl.div_rn(tl.full(amax.shape, V.largest, tl.float32), amax) * V.inverse_margin
    scale = tl.where(scale == float("inf"), V.if_infinite, scale)
    if V.scale == "pow2":
        scale = (scale.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, scale)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    return scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)


@triton.jit
def e4m3_scales(amax_b, s_enc, s_dec, V: tl.constexpr):
    """NVFP4's block scales: (byte, encode factor min(1/(s*S_dec), FLT_MAX), decode factor s)."""
    amax_b = finite_or_nan(amax_b)
    if V.scale == "e4m3_te2.13":
        exact_scale = tl.div_rn(amax_b, tl.full(amax_b.shape, V.range, tl.float32)) * s_enc
    else:
        exact_scale = amax_b * (s_enc * V.inverse_range)
    is_nan = exact_scale != exact_scale
    bits, s = snap(tl.minimum(exact_scale, 448.0), 0.0, 3, -6, 7, False)
    byte = tl.where(is_nan, 0x7F, (bits + (bits >> 20)) & 0x7F)
    s = tl.where(is_nan, float("nan"), s)
    encode = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s * s_dec)
    return byte.to(tl.uint8), tl.where(encode > FLT_MAX, FLT_MAX, encode), s


@triton.jit
def e8m0_decode(byte):
    """2^(byte-127) of bytes held in an int32; NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def e8m0_scales(amax_b, V: tl.constexpr):
    """MX's block scales: (byte, encode factor 2^(127-byte), decode factor 2^(byte-127)). Byte 0
    encodes with 1 (rceil) or 2^126.
    """
    if V.scale == "e8m0_rceil":
        bits = tl.div_rn(amax_b, tl.full(amax_b.shape, V.largest, tl.float32)).to(
            tl.int32, bitcast=True
        )
        exponent = bits >> 23
        mantissa = bits & 0x7FFFFF
        up = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
        byte = tl.minimum(exponent + up.to(tl.int32), 254)
    else:
        bits = amax_b.to(tl.int32, bitcast=True)
        if V.scale == "e8m0_even":
            bits += 1 << (22 - V.mantissa)
        byte = (bits >> 23) & 0xFF
        if V.scale == "e8m0_ceil":
            byte += ((bits & 0x7FFFFF) > 0).to(tl.int32)
        byte = tl.minimum(tl.maximum(byte - V.max_exponent, 0), 254)
    byte = tl.where(amax_b < float("inf"), byte, 255)
    ZERO: tl.constexpr = 1.0 if V.scale == "e8m0_rceil" else 2.0**126
    encode = tl.where(byte == 0, ZERO, e8m0_decode(tl.maximum(254 - byte, 0)))
    encode = tl.where(byte == 255, float("nan"), encode)
    return byte.to(tl.uint8), encode, e8m0_decode(byte)


@triton.jit
def block_scales(amax_b, s_enc, s_dec, V: tl.constexpr):
    """(stored scale, encode factor, decode factor) of each block; s_enc and s_dec count for E4M3
    only.
    """
    if V.scale == "e4m3" or V.scale == "e4m3_te2.13":
        return e4m3_scales(amax_b, s_enc, s_dec, V)
    elif V.scale == "fp32" or V.scale == "pow2":
        scale, inverse = float_scales(amax_b, V)
        return inverse, scale, inverse
    else:
        return e8m0_scales(amax_b, V)
