"""Products of the codes of several experts in one call of torch's scaled_grouped_mm.

    y [M, N]: rows of expert e are A_e · B_eᵀ      A_e [m_e, K] rows of all experts one after the other, B [E, N, K]

What `torch.nn.functional.scaled_grouped_mm` takes of them
(aten/src/ATen/native/cuda/GroupedBlas.cpp, and torch's own tests, test/test_scaled_matmul_cuda.py,
test_mxfp8_scaled_grouped_mm_2d_3d):

| scheme | compute capability | codes | scales of A; of B |
|---|---|---|---|
| FP8, a scale per row | 9.0 | E4M3 | float32 [M]; [E, N] |
| NVFP4 | 10.0 | E2M1 | E4M3 per 1×16, and a float32 per expert |
| MXFP8 | 10.0 | E4M3 | E8M0 per 1×32 |

Ends of experts among the rows are int32 [E] on the device. An expert's rows are padded to whole
tiles with zero codes: to 16, and to 32 under block scales. Scales of blocks are in tiles of 128×4
of each expert, one expert after the other: of A as a matrix, of B [E, ·]. One scale of a tensor is
that of each of its rows.

It writes BF16 only. Gradients of weights are summed over microbatches and ranks, in float32, so
wgrad is a product of `scaled_mm` per expert. So is what the table above does not have.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp4train.backends.native import Native, padded, padded_blocks, scheme
from fp4train.backends.protocol import Prepared
from fp4train.backends.table import Table
from fp4train.formats import E2M1, E4M3
from fp4train.hardware import Device
from fp4train.quantize import Quantized, QuantSpec, to_torch

_TILES = {ScalingType.BlockWise1x16: "NVFP4", ScalingType.BlockWise1x32: "MXFP8"}
_BLOCK_ROWS = 32
"""Multiple of an expert's rows under block scales."""
_SCALE_COLUMNS = 4


def why_not(table: Table, gemm: str, device: Device) -> str | None:
    """Why one call cannot multiply what `native` runs of `gemm` on `device`, expert by expert; None
    if it can.
    """
    a_spec, b_spec = table[gemm].both
    assert a_spec is not None and b_spec is not None
    if gemm == "wgrad":
        return "scaled_grouped_mm writes BF16, and gradients of weights are summed in float32"
    if table.dtype != "bfloat16":
        return f"scaled_grouped_mm writes BF16, not {table.dtype}"
    if a_spec.format != b_spec.format or a_spec.format not in (E2M1, E4M3):
        return (
            f"scaled_grouped_mm does not multiply {a_spec.element.upper()} by "
            f"{b_spec.element.upper()}"
        )
    kind = scheme(a_spec)
    if kind is not None and kind.scaling not in _TILES:
        return f"scaled_grouped_mm has no {kind.title}"
    if kind is not None and {_global(a_spec), _global(b_spec)} != {
        "tensor" if kind.title == "NVFP4" else None
    }:
        return (
            "scaled_grouped_mm takes one global scale per expert with E4M3 scales, and none "
            "with E8M0"
        )
    needed = (9, 0) if kind is None else (10, 0)
    if device.capability != needed:
        have = ".".join(map(str, device.capability or ())) or "none"
        title = "FP8" if kind is None else kind.title
        return (
            f"scaled_grouped_mm of {title} needs compute capability {needed[0]}.0; {device} has "
            f"{have}"
        )
    if kind is not None and device.here and "USE_MSLK" not in torch.__config__.show():
        return f"scaled_grouped_mm of {kind.title} needs a torch that is built with MSLK"
    return None


def _global(spec: QuantSpec) -> str | None:
    if spec.global_scale in ("tensor", "row", "block"):
        return spec.global_scale
    return None


class Products:
    """Products of one GEMM of several experts: `product` takes the operands as a backend's does,
    `made` multiplies all.

    Args:
        backend: whose `why_not` and the one above have nothing against them.
    """

    def __init__(self, backend: Native) -> None:
        self.backend = backend
        self.operands: list[tuple[Quantized, Quantized, Tensor | None]] = []

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Nothing yet: an empty tensor; as `Backend.product` but for that."""
        assert isinstance(a, Quantized) and isinstance(b, Quantized)
        self.operands.append((a, b, bias))
        return a.codes.new_empty(0, dtype=out_dtype)

    def made(self) -> list[Tensor]:
        """The products, BF16, in the order in which they were added."""
        if not self.operands:
            return []
        firsts, seconds, biases = zip(*self.operands, strict=True)
        products = multiply(firsts, seconds, fast=self.backend.fast)
        return [
            y if bias is None else y + bias.to(y.dtype)
            for y, bias in zip(products, biases, strict=True)
        ]


def multiply(
    firsts: Sequence[Quantized], seconds: Sequence[Quantized], *, fast: bool = False
) -> list[Tensor]:
    """a·bᵀ of each pair, BF16 [m, N]; all b are of one shape.

    Args:
        fast: whether FP8 with a scale per row is summed in the fast accumulator.
    """
    kind = scheme(firsts[0].spec)
    swizzles = [SwizzleType.NO_SWIZZLE]
    if kind is None:
        rows = [padded(a) for a in firsts]
        scalings = [ScalingType.RowWise]
        codes = [a.view(torch.float8_e4m3fn) for a, _ in rows]
        scales = [s.expand(a.shape[0], 1)[:, 0] for a, s in rows]
        b_codes = torch.stack([b.codes for b in seconds]).view(torch.float8_e4m3fn)
        b_scales = [torch.stack([b.scales.expand(b.shape[0], 1)[:, 0] for b in seconds])]
        a_scales = [torch.cat(scales)]
    else:
        width = firsts[0].element_width + -firsts[0].element_width % kind.multiple
        lefts = [to_torch(padded_blocks(a, width, _BLOCK_ROWS)) for a in firsts]
        rights = [to_torch(padded_blocks(b, width)) for b in seconds]
        columns = width // kind.cols
        codes = [a.codes for a in lefts]
        b_codes = torch.stack([b.codes.view(torch.uint8) for b in rights])
        b_codes = b_codes.view(codes[0].dtype)
        a_scales = [
            _joined([a.scales for a in lefts]).view(-1, columns + -columns % _SCALE_COLUMNS)
        ]
        b_scales = [_joined([b.scales for b in rights]).view(len(rights), -1)]
        scalings = [kind.scaling]
        swizzles = [SwizzleType.SWIZZLE_32_4_4]
        if kind.scaling == ScalingType.BlockWise1x16:
            for operand_scales, operands in ((a_scales, lefts), (b_scales, rights)):
                operand_scales.append(
                    torch.stack([x.factor for x in operands if x.factor is not None])
                )
            scalings = [*scalings, ScalingType.TensorWise]
            swizzles = [*swizzles, SwizzleType.NO_SWIZZLE]
    ends = list(accumulate(a.shape[0] for a in codes))
    y: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        _joined(codes),
        b_codes.transpose(-2, -1),
        a_scales,
        scalings,
        b_scales,
        scalings,
        swizzles,
        swizzles,
        offs=torch.tensor(ends, dtype=torch.int32, device=b_codes.device),
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    starts = [0, *ends[:-1]]
    return [y[start : start + a.shape[0]] for start, a in zip(starts, firsts, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenation along the first axis, by bytes: torch concatenates no FP8 or FP4."""
    all_bytes = torch.cat([part.view(torch.uint8) for part in parts])
    return all_bytes.view(parts[0].dtype)
