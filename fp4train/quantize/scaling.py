"""Scales from amax: NVFP4's two levels, MX's E8M0, FP8's float32. All arithmetic is float32, in the
order written here.

A non-finite amax makes every scale that depends on it NaN, in every format: NaN and infinity are
never hidden.

Four over six (arXiv 2512.02010): each block is scaled to 6 and to 4, and the smaller error wins.

E2M1 has no value between 4 and 6, so a block with large values there rounds badly. Scaled to 4 (its
scale times 1.5) the block loses range and gains a finer grid at the top. Arithmetic and order
follow TE, whose warp reduction adds the 16 errors of a row in sequence and the 16 rows of a 16x16
block as a tree; ties keep 6. The base scale is (amax_b / 6) * S_enc under either formula.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.formats import AdaptiveScale, ElementFormat, ScaleFormat, e8m0_decode, e8m0_encode
from fp4train.formats.levels import SIGN
from fp4train.quantize.rounding import round_to_values
from fp4train.quantize.spec import Delayed, QuantSpec

SMALLEST_MACRO = 1e-12
"""The amax of a macro-block is at least this where its mantissa is chosen, as in ALTO."""
FLOAT32_MAX = torch.finfo(torch.float32).max
TILE_ROWS = 128
TILE_COLS = 4


def nan_if_not_finite(amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), amax, torch.nan)


def element_range(spec: QuantSpec) -> float:
    """The magnitude that the amax is scaled to: the largest element value times the guard."""
    return spec.format.max * spec.guard


def global_scales(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(S_enc, S_dec) of NVFP4: S_enc = bound*6/amax, 1 where amax = 0, capped at FLT_MAX; S_dec =
    1/S_enc. Of macro-blocks their mantissas, from 1 to 2, and 1 over these.
    """
    if spec.global_scale == "macro":
        mantissa = 1.0 + macro_codes(amax, spec).to(torch.float32) * 2.0**-8
        mantissa = torch.where(amax.isfinite(), mantissa, torch.nan)
        return mantissa, mantissa.reciprocal()
    bound = amax.new_full((), spec.global_bound * element_range(spec))
    encode = (bound / amax).clamp_(max=FLOAT32_MAX)
    encode = torch.where(amax == 0, 1.0, encode)
    encode = torch.where(amax.isfinite(), encode, torch.nan)
    return encode, encode.reciprocal()


def macro_codes(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Bytes of the mantissas of macro-blocks: the upper 8 bits of that of max / amax, cut off, so
    that amax times 1 + byte/256 is at most max times a power of two.
    """
    ratio = amax.new_full((), element_range(spec)) / amax.clamp(min=SMALLEST_MACRO)
    return ((ratio.view(torch.int32) >> 15) & 0xFF).to(torch.uint8)


def outer_amax(amax_b: Tensor, spec: QuantSpec) -> Tensor:
    """The amaxes of what shares a scale above those of blocks, [ceil(R/rows), ceil(C/columns)], or
    that of the tensor, from the amaxes of the blocks [Rb, Cb].
    """
    if spec.extent is None:
        return amax_b.amax() if amax_b.numel() else amax_b.new_zeros(())
    tall, wide = _outer_blocks(spec, amax_b.shape[1])
    below, beside = -amax_b.shape[0] % tall, -amax_b.shape[1] % wide
    amax_b = F.pad(amax_b, (0, beside, 0, below))
    rows, columns = amax_b.shape
    if not columns:
        return amax_b.new_zeros(rows // tall, 1)
    return amax_b.reshape(rows // tall, tall, columns // wide, wide).amax(dim=(1, 3))


def spread_outer(per_outer: Tensor, blocks: torch.Size, spec: QuantSpec) -> Tensor:
    """What is one for each of `outer_amax` for the blocks [Rb, Cb]; [R, 1] of whole rows, and what
    is of the tensor as it is.
    """
    if spec.extent in (None, (1, None)):
        return per_outer
    tall, wide = _outer_blocks(spec, blocks[1])
    spread = per_outer.repeat_interleave(tall, dim=0)[: blocks[0]]
    if spec.outer is None:
        return spread
    return spread.repeat_interleave(wide, dim=1)[:, : blocks[1]]


def _outer_blocks(spec: QuantSpec, blocks: int) -> tuple[int, int]:
    """Blocks down and across what shares a scale above theirs, of a row of `blocks` blocks."""
    assert spec.extent is not None
    rows, columns = spec.extent
    tall = rows // (spec.block[0] or 1)
    wide = max(blocks, 1) if columns is None else columns // (spec.block[1] or columns)
    return tall, wide


def block_scales_two_level(amax_b: Tensor, encode: Tensor, spec: QuantSpec) -> Tensor:
    """Bytes of block scales under a global scale: amax_b * (S_enc * (1/6)), or TE <= 2.13's (amax_b
    / 6) * S_enc.
    """
    largest = amax_b.new_full((), element_range(spec))
    amax_b = nan_if_not_finite(amax_b)
    if spec.formula == "te2.13":
        return spec.scale_format.encode((amax_b / largest) * encode)
    factor = (encode * largest.reciprocal()).clamp(max=FLOAT32_MAX)
    return spec.scale_format.encode(amax_b * factor)


def encode_centric(amax_b: Tensor, encode: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(Bytes of block scales, factors of their elements): with m = 6 / (amax_b * S_enc) rounded,
    they are 1 / m and min(m * S_enc, FLT_MAX).
    """
    fmt = spec.scale_format
    ratio = amax_b.new_full((), element_range(spec)) / (nan_if_not_finite(amax_b) * encode)
    multiplier = fmt.decode(fmt.encode(ratio.clamp_(max=FLOAT32_MAX)))
    return fmt.encode(multiplier.reciprocal()), (multiplier * encode).clamp_(max=FLOAT32_MAX)


def out_of_chunks(
    stored: Tensor, chunks: Tensor, spec: QuantSpec, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(Bytes of block scales, amaxes) under the scale of `spec.global_scale`.

    As in the authors' kernels (github.com/MrHuff/mfu-fp4-training, nvfp4_CTA_local_v4): a block
    scale times the float32 quotient of both scales, amax / bound each, rounded to nearest; those of
    square blocks, as weights have them, stay above zero.

    Args:
        stored: bytes [Rb, Cb] under the scales of chunks.
        chunks: amaxes of the chunks.
        amax: amax of the tensor; None: that of the chunks.
    """
    fmt = spec.scale_format
    chunk = spread_outer(chunks, stored.shape, spec.of_chunks)
    if amax is None:
        amax = outer_amax(chunk, spec)
    else:
        amax = amax.to(chunk).reshape(())
    bound = chunk.new_full((), spec.global_bound * element_range(spec))
    outer = spread_outer(amax, stored.shape, spec) / bound
    ratio = torch.where(chunk == 0, 0.0, chunk / bound / outer)
    scale = fmt.decode(stored) * ratio
    if spec.block[0] != 1:
        scale = torch.where(scale > 0, scale.clamp(min=fmt.smallest), scale)
    return fmt.encode(scale), amax


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device: CUDA multiplies by the reciprocal of a number."""
    return x / x.new_full((), divisor)


def encode_factor(decode: Tensor) -> Tensor:
    """The factor that scales x to the element grid, from the decode factor: min(1 / decode,
    FLT_MAX).
    """
    return decode.reciprocal().clamp_(max=FLOAT32_MAX)


def choose_scales(
    x_blocks: Tensor, amax_b: Tensor, amax: Tensor, encode: Tensor, decode: Tensor, spec: QuantSpec
) -> Tensor:
    """Bytes [Rb, Cb] of the better scale per block. x_blocks is float32 [Rb, br, Cb, bc], amax 0-d
    or [R, 1].
    """
    base = divided(nan_if_not_finite(amax_b), spec.format.max) * encode
    six = spec.scale_format.encode(base)
    four = spec.scale_format.encode(base * 1.5)
    error_six = block_error(x_blocks, six, amax, decode, spec)
    error_four = block_error(x_blocks, four, amax, decode, spec)
    return torch.where(error_four < error_six, four, six)


def block_error(
    x_blocks: Tensor, scale_bytes: Tensor, amax: Tensor, decode: Tensor, spec: QuantSpec
) -> Tensor:
    """Sum of |error| or error^2 per block [Rb, Cb], decoded as ((e2m1 * scale) * amax) / (6 *
    bound).
    """
    scales = spec.scale_format.decode(scale_bytes)
    factor = encode_factor(scales * decode)[:, None, :, None]
    values = round_to_values(x_blocks * factor, spec.format)
    values.mul_(scales[:, None, :, None]).mul_(amax.reshape(-1, 1, 1, 1))
    largest = values.new_full((), spec.format.max * spec.global_bound)
    difference = values.div_(largest).sub_(x_blocks)
    if spec.four_over_six == "mse":
        return _block_sums(difference.square_())
    return _block_sums(difference.abs_())


def choose_grids(
    x_blocks: Tensor, stored: Tensor, amax: Tensor, decode: Tensor, spec: QuantSpec
) -> Tensor:
    """Bytes [Rb, Cb] of IF4 with the sign where a block has the smaller squared error on its grid of
    integers, both rounded to nearest; at equal error it stays E2M1. Arguments as of
    `choose_scales`.

    The values are ((element * scale) * amax) / (6 * bound), of integers times 6/7 before the
    division, as the authors' reference has them (github.com/mit-han-lab/fouroversix).
    """
    fmt = spec.scale_format
    assert isinstance(fmt, AdaptiveScale)
    scales = fmt.decode(stored)
    t = x_blocks * encode_factor(scales * decode)[:, None, :, None]
    bound = element_range(spec) * spec.global_bound

    def error(elements: Tensor, step: float) -> Tensor:
        values = elements.mul_(scales[:, None, :, None]).mul_(amax.reshape(-1, 1, 1, 1))
        if step != 1.0:
            values.mul_(step)
        return _block_sums(values.div_(values.new_full((), bound)).sub_(x_blocks).square_())

    float_error = error(round_to_values(t, spec.format), 1.0)
    integer_error = error(round_to_values(t * (1.0 / fmt.step), fmt.other), fmt.step)
    return torch.where(integer_error < float_error, stored | SIGN, stored)


def _block_sums(errors: Tensor) -> Tensor:
    """Sums over the blocks of [Rb, br, Cb, bc] as TE adds: columns in sequence, rows as a tree."""
    total = errors[..., 0].clone()
    for column in range(1, errors.shape[-1]):
        total.add_(errors[..., column])
    while (rows := total.shape[1]) > 1 and rows % 2 == 0:
        total = total[:, : rows // 2] + total[:, rows // 2 :]
    return total.sum(dim=1)


def block_scales(amax_b: Tensor, spec: QuantSpec) -> Tensor:
    """Bytes of block scales without a global scale, amax_b / 6, rounded as their format rounds."""
    return spec.scale_format.encode(divided(nan_if_not_finite(amax_b), element_range(spec)))


def block_scales_e8m0(amax_b: Tensor, fmt: ElementFormat, mode: str) -> Tensor:
    """E8M0 bytes of the block scales.

    rceil: 2^ceil(log2(amax / max)), never clips (cuBLAS, TE). floor: 2^(floor(log2 amax) - emax)
        (OCP MX v1.0, section 6.3);
    ceil: the exponent rounded up; even: amax first rounded to the element's mantissa.
    """
    if mode == "rceil":
        ratio = divided(amax_b, fmt.max)
        return e8m0_encode(torch.where(amax_b.isfinite(), ratio.clamp(max=FLOAT32_MAX), ratio))
    bits = amax_b.contiguous().view(torch.int32)
    if mode == "even":
        bits = bits + (1 << (22 - fmt.mantissa_bits))
    exponent = (bits >> 23) & 0xFF
    if mode == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    codes = (exponent - fmt.max_exponent).clamp_(min=0, max=254)
    return torch.where(amax_b.isfinite(), codes, 255).to(torch.uint8)


def encode_scales_e8m0(scale_bytes: Tensor, mode: str) -> Tensor:
    """2^(127 - byte). Byte 0 (a block below 2^-127 * max, or of zeros) takes 1 with rceil (TE) and
    2^126 otherwise (torchao).
    """
    factor = e8m0_decode((254 - scale_bytes.to(torch.int32)).clamp_(min=0))
    factor = torch.where(scale_bytes == 0, 1.0 if mode == "rceil" else 2.0**126, factor)
    return torch.where(scale_bytes == 255, torch.nan, factor)


def product_factor(spec: QuantSpec, device: torch.device) -> Tensor | None:
    """`spec.product_factor` as a tensor, float32 0-d; None for 1."""
    if spec.product_factor is None:
        return None
    return torch.full((), spec.product_factor, dtype=torch.float32, device=device)


def scales_float(
    amax: Tensor,
    fmt: ElementFormat,
    scale_format: ScaleFormat,
    dtype: torch.dtype,
    *,
    margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """(scale, scale_inv) of FP8: scale = (max / amax) / 2^margin, rounded to its format, 1 where
    amax = 0.

    An infinite quotient (amax < 1e-36) becomes the largest value of x's dtype, as in TE.
    """
    scale = (amax.new_full((), fmt.max) / amax) / 2.0**margin
    scale = torch.where(scale.isinf(), torch.finfo(dtype).max, scale)
    scale = scale_format.encode(scale)
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    return scale, scale.reciprocal()


def delayed_amax(history: Tensor, previous: Tensor, delayed: Delayed) -> Tensor:
    """The amaxes that delayed scaling uses now, from those of earlier steps (float32 [...,
    history], newest first).

    Where that is 0 or not finite, `previous` (float32 [...]) is used, as TE keeps its previous
    scale.
    """
    if delayed.algorithm == "max":
        amax = history.amax(-1)
    else:
        amax = history[..., 0]
    return torch.where((amax > 0) & amax.isfinite(), amax, previous)


def initial_delayed_amax(spec: QuantSpec) -> float:
    """The amax that gives a scale of 1: used by delayed scaling before its first step."""
    margin = spec.delayed.margin if spec.delayed else 0
    return spec.format.max * 2.0**-margin


def swizzle_scales(scales_RC: Tensor) -> Tensor:
    """[R, C] -> flat [ceil(R/128)*ceil(C/4)*512] in the 128x4 layout, zero-padded. Any dtype, one
    element per scale.
    """
    rows, cols = scales_RC.shape
    below = -rows % TILE_ROWS
    beside = -cols % TILE_COLS
    if below or beside:
        padded = F.pad(scales_RC, (0, beside, 0, below))
    else:
        padded = scales_RC
    tiles = padded.reshape(
        padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_COLS, TILE_COLS
    )
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(flat: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle_scales` for scales [rows, cols]."""
    row_tiles = -(-rows // TILE_ROWS)
    col_tiles = -(-cols // TILE_COLS)
    if flat.numel() != row_tiles * col_tiles * TILE_ROWS * TILE_COLS:
        expected = row_tiles * col_tiles * TILE_ROWS * TILE_COLS
        raise ValueError(
            f"flat has {flat.numel()} scales: [{rows}, {cols}] swizzled has {expected}"
        )
    tiles = flat.reshape(row_tiles, col_tiles, 32, 4, TILE_COLS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * TILE_ROWS, col_tiles * TILE_COLS)[:rows, :cols].contiguous()
