"""Codes and scales in the layouts of the hardware.

cuBLAS and torch's `scaled_mm` read block scales of NVFP4 and MX in tiles of 128 rows x 4 columns
(512 bytes), rows padded to 128 and columns to 4 with zeros. Inside a tile row r, column c lies at
(r % 32)*16 + (r // 32)*4 + c: one warp lane's 16 bytes hold the scales of rows r, r+32, r+64, r+96
(cuBLAS documentation, "1D block scaling factors layout"). Column-wise operands need no layout of
their own: they are the transposed tensor, quantised and stored.
"""

import torch
from torch import Tensor

from fp4train.formats import ELEMENT_FORMATS
from fp4train.quantize.quantized import Quantized
from fp4train.quantize.scaling import swizzle_scales
from fp4train.quantize.spec import QuantSpec

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
        no dtype: FP6, UE5M3 scales.
    """
    if q.tiled:
        return q
    if (reason := why_no_layout(q.spec)) is not None:
        raise ValueError(f"{reason}. Multiply `q.decoded()` instead")
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
