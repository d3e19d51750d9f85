"""Codes and scales in the layouts of the hardware.

cuBLAS and torch's `scaled_mm` read block scales of NVFP4 and MX in tiles of 128 rows x 4 columns (512 bytes), rows
padded to 128 and columns to 4 with zeros. Inside a tile row r, column c lies at (r % 32)*16 + (r // 32)*4 + c: one warp
lane's 16 bytes hold the scales of rows r, r+32, r+64, r+96 (cuBLAS documentation, "1D block scaling factors layout").
Column-wise operands need no layout of their own: they are the transposed tensor, quantised and stored.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.formats import pack_fp4
from fp4train.quantize.quantized import Quantized
from fp4train.quantize.rounding import round_to_codes
from fp4train.quantize.scaling import block_scales_two_level, encode_factor
from fp4train.quantize.spec import QuantSpec

TILE_ROWS, TILE_COLS = 128, 4


def swizzle_scales(scales_RC: Tensor) -> Tensor:
    """[R, C] -> flat [ceil(R/128)*ceil(C/4)*512] in the 128x4 layout, zero-padded. Any dtype, one element per scale."""
    rows, cols = scales_RC.shape
    below, beside = -rows % TILE_ROWS, -cols % TILE_COLS
    padded = F.pad(scales_RC, (0, beside, 0, below)) if below or beside else scales_RC
    tiles = padded.reshape(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(flat: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle_scales` for scales [rows, cols]."""
    row_tiles, col_tiles = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    if flat.numel() != row_tiles * col_tiles * TILE_ROWS * TILE_COLS:
        wanted = row_tiles * col_tiles * TILE_ROWS * TILE_COLS
        raise ValueError(f"flat has {flat.numel()} scales: [{rows}, {cols}] swizzled has {wanted}")
    tiles = flat.reshape(row_tiles, col_tiles, 32, 4, TILE_COLS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * TILE_ROWS, col_tiles * TILE_COLS)[:rows, :cols].contiguous()


def nvfp4_quantize(a_MK: Tensor, sf_g: Tensor) -> tuple[Tensor, Tensor]:
    """(q, scale) as NVFP4 quantisation kernels return them.

    a_MK: FP16 (or BF16, float32) [M, K], K a multiple of 16. sf_g: float32, one value, 448*6/amax. Returns q, uint8 [M,
        K/2] with two E2M1 codes per byte, and scale, uint8 E4M3 bytes E4M3((amax_b/6)*sf_g) in the 128x4 layout.
    """
    if a_MK.ndim != 2 or a_MK.shape[1] % 16:
        raise ValueError(f"a has shape {tuple(a_MK.shape)}: nvfp4_quantize takes [M, K] with K a multiple of 16")
    if sf_g.numel() != 1:
        raise ValueError(f"sf_g has {sf_g.numel()} values: nvfp4_quantize takes one, 448*6/amax")
    spec = QuantSpec(formula="te2.13")
    rows, cols = a_MK.shape
    blocks = a_MK.detach().to(torch.float32).reshape(rows, cols // 16, 16)
    encode = sf_g.to(torch.float32).reshape(())
    scales = block_scales_two_level(blocks.abs().amax(dim=-1), encode, spec)
    t = (blocks * encode_factor(spec.scale_format.decode(scales) * encode.reciprocal()).unsqueeze(-1)).add_(0.0)
    codes = round_to_codes(t, spec.format).reshape(rows, cols)
    return pack_fp4(codes), swizzle_scales(scales)


@dataclass(frozen=True)
class HardwareTensor:
    """Codes and scales in torch's dtypes and the hardware's layout: one operand of `torch.nn.functional.scaled_mm`.

    data: float4_e2m1fn_x2 [R, Cp/2], or float8_e4m3fn / float8_e5m2 [R, Cp]. scales: float8_e4m3fn (NVFP4) or
        float8_e8m0fnu (MX), flat in the 128x4 layout, one per row and block (2-D blocks repeated for their rows);
        float32 as in `Quantized` otherwise.
    global_scale: the float32 factor to apply to the product (0-d or [R, 1]), or None.
    """

    data: Tensor
    scales: Tensor
    global_scale: Tensor | None


_DATA_DTYPES: Final = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BLOCK_SCALE_DTYPES: Final = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
_FLOAT_SCALES: Final = ("fp32", "pow2")


def why_no_layout(spec: QuantSpec) -> str | None:
    """Why torch has no dtypes for codes and scales of this spec, or None."""
    if spec.element not in _DATA_DTYPES:
        return f"element={spec.element!r} has no torch dtype; allowed: {', '.join(_DATA_DTYPES)}"
    if spec.global_scale == "block":
        return "global_scale='block' has no torch dtype: scaled_mm takes one float32 scale per tensor or row"
    if spec.scale not in _BLOCK_SCALE_DTYPES and spec.scale not in _FLOAT_SCALES:
        return f"scale={spec.scale!r} has no torch dtype; allowed: {', '.join((*_BLOCK_SCALE_DTYPES, *_FLOAT_SCALES))}"
    return None


def to_torch(q: Quantized) -> HardwareTensor:
    """`q` in torch's dtypes and the hardware's layout. ValueError if torch has no dtype: FP6 (see `formats.pack_fp6`),
    UE5M3 scales."""
    if (reason := why_no_layout(q.spec)) is not None:
        raise ValueError(f"{reason}. Multiply `q.decoded()` instead, or pack the codes yourself (formats.pack_fp6)")
    data = q.codes.contiguous().view(_DATA_DTYPES[q.spec.element])
    if q.spec.scale in _FLOAT_SCALES:
        return HardwareTensor(data, q.scales, None)
    height = q.spec.block[0] or 1
    scales = q.scales if height == 1 else q.scales.repeat_interleave(height, dim=0)[: q.shape[0]]
    swizzled = swizzle_scales(scales).view(_BLOCK_SCALE_DTYPES[q.spec.scale])
    return HardwareTensor(data, swizzled, q.global_decode())


def from_torch(
    tensor: HardwareTensor, spec: QuantSpec, shape: tuple[int, int], amax: Tensor | None = None
) -> Quantized:
    """The inverse of `to_torch`. `amax` is `Quantized.amax`, which the hardware does not store."""
    if (reason := why_no_layout(spec)) is not None:
        raise ValueError(reason)
    codes = tensor.data.view(torch.uint8)
    if spec.scale in _FLOAT_SCALES:
        return Quantized(spec, shape, codes, tensor.scales, amax)
    padded = codes.shape[1] * (2 if spec.element == "e2m1" else 1)
    scales = unswizzle_scales(tensor.scales.view(torch.uint8), shape[0], padded // (spec.block[1] or padded))
    return Quantized(spec, shape, codes, scales[:: spec.block[0] or 1].contiguous(), amax)
