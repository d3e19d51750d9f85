"""Codes and scales in the layouts of the hardware.

cuBLAS and torch's `scaled_mm` read block scales of NVFP4 and MX in tiles of 128 rows x 4 columns
(512 bytes), rows padded to 128 and columns to 4 with zeros. Inside a tile row r, column c lies at
(r % 32)*16 + (r // 32)*4 + c: one warp lane's 16 bytes hold the scales of rows r, r+32, r+64, r+96
(cuBLAS documentation, "1D block scaling factors layout"). Column-wise operands need no layout of
their own: they are the transposed tensor, quantised and stored.
"""

import torch
from torch import Tensor

from fp4train.formats import ELEMENT_FORMATS, pack_fp4
from fp4train.quantize.quantized import Quantized
from fp4train.quantize.rounding import round_to_codes
from fp4train.quantize.scaling import block_scales_two_level, encode_factor, swizzle_scales
from fp4train.quantize.spec import QuantSpec


def nvfp4_quantize(a_MK: Tensor, sf_g: Tensor) -> tuple[Tensor, Tensor]:
    """(q, scale) as NVFP4 quantisation kernels return them.

    a_MK: FP16 (or BF16, float32) [M, K], K a multiple of 16. sf_g: float32, one value, 448*6/amax.
        Returns q, uint8 [M, K/2] with two E2M1 codes per byte, and scale, uint8 E4M3 bytes
        E4M3((amax_b/6)*sf_g) in the 128x4 layout.
    """
    if a_MK.ndim != 2 or a_MK.shape[1] % 16:
        raise ValueError(
            f"a has shape {tuple(a_MK.shape)}: nvfp4_quantize takes [M, K] with K a multiple of 16"
        )
    if sf_g.numel() != 1:
        raise ValueError(f"sf_g has {sf_g.numel()} values: nvfp4_quantize takes one, 448*6/amax")
    spec = QuantSpec(formula="te2.13")
    rows, cols = a_MK.shape
    blocks = a_MK.detach().to(torch.float32).reshape(rows, cols // 16, 16)
    encode = sf_g.to(torch.float32).reshape(())
    scales = block_scales_two_level(blocks.abs().amax(dim=-1), encode, spec)
    t = (
        blocks * encode_factor(spec.scale_format.decode(scales) * encode.reciprocal()).unsqueeze(-1)
    ).add_(0.0)
    codes = round_to_codes(t, spec.format).reshape(rows, cols)
    return pack_fp4(codes), swizzle_scales(scales)


TILED_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
_FLOAT_SCALES = ("fp32", "pow2")


def why_no_layout(spec: QuantSpec) -> str | None:
    """Why torch has no dtypes for codes and scales of this spec, or None."""
    if spec.format.dtype is None:
        allowed = ", ".join(fmt.name for fmt in ELEMENT_FORMATS if fmt.dtype is not None)
        return f"element={spec.element!r} has no torch dtype; allowed: {allowed}"
    if spec.global_scale not in (None, "tensor", "row"):
        return (
            f"global_scale={spec.global_scale!r} has no torch dtype: scaled_mm takes one float32 "
            "scale per "
            "tensor or row"
        )
    if spec.scale not in TILED_DTYPES and spec.scale not in _FLOAT_SCALES:
        return (
            f"scale={spec.scale!r} has no torch dtype; allowed: "
            f"{', '.join((*TILED_DTYPES, *_FLOAT_SCALES))}"
        )
    return None


def to_torch(q: Quantized) -> Quantized:
    """`q` as `torch.nn.functional.scaled_mm` takes it; itself if its scales lie in tiles.

    codes: float4_e2m1fn_x2 [R, Cp/2], or float8_e4m3fn / float8_e5m2 [R, Cp]. scales: float8_e4m3fn
        (NVFP4) or float8_e8m0fnu (MX), flat in the 128x4 layout, one per row and block (2-D blocks
        repeated for their rows), and S_dec beside them; else as they are. ValueError if torch has
        no dtype: FP6 (see `formats.pack_fp6`), UE5M3 scales.
    """
    if q.tiled:
        return q
    if (reason := why_no_layout(q.spec)) is not None:
        raise ValueError(
            f"{reason}. Multiply `q.decoded()` instead, or pack the codes yourself "
            "(formats.pack_fp6)"
        )
    assert q.spec.format.dtype is not None
    codes = q.codes.contiguous().view(q.spec.format.dtype)
    if q.spec.scale not in TILED_DTYPES:
        return q._replace(codes=codes)
    scales = tiled_scales(q).view(TILED_DTYPES[q.spec.scale])
    return q._replace(codes=codes, scales=scales, factor=q.global_decode())


def tiled_scales(q: Quantized) -> Tensor:
    """The block scales of `q`, bytes, flat in the 128x4 layout, one per row and block; as they are
    if they lie so.
    """
    if q.tiled:
        return q.scales
    scales = q.scales
    height = q.spec.block[0] or 1
    if height > 1:
        scales = scales.repeat_interleave(height, dim=0)[: q.shape[0]]
    return swizzle_scales(scales)
