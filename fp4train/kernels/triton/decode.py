"""Codes and scales -> values: element * block scale, without the global scale; what `Quantized.decoded()` holds.

Codes are decoded by arithmetic: exponent and mantissa moved to a float32's place give value * 2^(bias-127),
subnormals included, and one multiplication by 2^(127-bias), exact, does the rest. Bytes an element: 0.5 + 1/16 + 2
for NVFP4, 1 + 1/32 + 2 for MXFP8.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton.bits import as_bf16
from fp4train.kernels.triton.scale import e8m0_decode


@triton.jit
def decode_codes(
    code, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, CODE_BITS: tl.constexpr, NAN_ABOVE: tl.constexpr
):
    """uint32 codes -> float32. NAN_ABOVE: magnitudes above this code are NaN (E4M3: 0x7e)."""
    magnitude = code & ((1 << CODE_BITS) - 1)
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (126 + MIN_EXPONENT))
    value = tl.where(magnitude > NAN_ABOVE, float("nan"), value)
    sign = (code << (31 - CODE_BITS)) & 0x80000000
    return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_blocks(
    code_ptr,
    scale_ptr,
    out_ptr,
    rows,
    groups,
    tiles,
    width,
    code_stride,
    out_stride,
    SCALE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    CODE_BITS: tl.constexpr,
    NAN_ABOVE: tl.constexpr,
    N: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Codes uint8 [rows, groups*N], or, for E2M1, int32 words [rows, groups*N/8]; scales [rows/HEIGHT, groups].
    SCALE: e4m3, e8m0, other. out [rows, width], BF16 or float32. tiles: programs across a row."""
    tile_row = tl.program_id(0) // tiles
    tile_col = tl.program_id(0) % tiles
    i = tl.arange(0, ROWS * BLOCKS)
    row = tile_row * ROWS + i // BLOCKS
    group = tile_col * BLOCKS + i % BLOCKS
    inside = (row < rows) & (group < groups)
    g = tl.arange(0, N // 8)
    j = tl.arange(0, 8)
    col = group[:, None, None] * N + (g * 8)[None, :, None] + j[None, None, :]
    row64 = row.to(tl.int64)
    code_row = (row64 * code_stride)[:, None]
    if CODE_BITS == 3:
        word = tl.load(code_ptr + code_row + group[:, None] * (N // 8) + g[None, :], mask=inside[:, None], other=0)
        code = (word.to(tl.uint32, bitcast=True)[:, :, None] >> (4 * j)[None, None, :].to(tl.uint32)) & 0xF
    else:
        code = tl.load(code_ptr + code_row[:, :, None] + col, mask=inside[:, None, None], other=0).to(tl.uint32)
    stored = tl.load(scale_ptr + row64 // HEIGHT * groups + group, mask=inside, other=0)
    if SCALE == "e4m3":
        scale = decode_codes(stored.to(tl.uint32), 3, -6, 7, 0x7E)
    elif SCALE == "e8m0":
        scale = e8m0_decode(stored.to(tl.int32))
    else:
        scale = stored
    value = decode_codes(code, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_ABOVE) * scale[:, None, None]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        value = as_bf16(value, HARDWARE)
    mask = (row < rows)[:, None, None] & (col < width)
    tl.store(out_ptr + (row64 * out_stride)[:, None, None] + col, value, mask=mask)
