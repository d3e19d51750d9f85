"""Products of block-scaled codes on tensor cores: NVFP4 and MXFP8 on compute capability 10.x, FP8 in blocks on 9.0.

What `torch.nn.functional.scaled_mm` takes of A [M, K] and B [N, K], which it multiplies as A·Bᵀ (torch 2.11,
aten/src/ATen/native/cuda/ScaledBlas.cpp; layouts of scales: cuBLAS documentation, "Narrow precision data types usage"):

| scheme | codes | scales of A, likewise of B |
|---|---|---|
| NVFP4 | E2M1, two per byte | E4M3 per 1×16, in tiles of 128×4; one float32 global scale |
| MXFP8 | E4M3 or E5M2 | E8M0 per 1×32, in tiles of 128×4 |
| FP8 blocks, 1×128 | E4M3 or E5M2 | float32 [M, K/128], rows adjacent in memory |
| FP8 blocks, 128×128 | E4M3 or E5M2 | float32 [⌈K/128⌉ to a multiple of 4, M/128], K adjacent; one operand only |

A is row-major and B column-major: both are stored with K contiguous, as `Quantized` stores them. Square blocks of NVFP4
and MXFP8 have the scale of their block repeated for each row. Global scales multiply the float32 accumulator, so the
result is rounded once, and equals emulation up to the order of accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp4train.backends.table import Operands, Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Quantized, QuantSpec, to_torch

_ROWS: Final = 16
"""Rows of A and B are padded to multiples of this."""

_SQUARE: Final = (128, 128)


@dataclass(frozen=True, kw_only=True)
class BlockScheme:
    """One kind of block-scaled operand.

    Args:
        title: name in messages.
        elements: element formats; cols: width of a block.
        rows: heights of a block; None: any.
        capabilities: the compute capabilities that multiply it, from the first up to, but without, the second.
        cuda: the first version of CUDA whose cuBLAS does.
        multiple: of in_features and out_features; tokens are padded to it where they are contracted.
        dtypes: of the product.
    """

    title: str
    elements: tuple[str, ...]
    scales: tuple[str, ...]
    cols: int
    rows: tuple[int, ...] | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((10, 0), (11, 0))
    cuda: tuple[int, int] = (12, 8)
    multiple: int = 32
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    scaling: ScalingType

    def takes(self, spec: QuantSpec) -> bool:
        rows, cols = spec.block
        return (
            spec.element in self.elements
            and spec.scale in self.scales
            and spec.global_scale != "block"
            and cols == self.cols
            and rows is not None
            and (self.rows is None or rows in self.rows)
        )


SCHEMES: Final = (
    BlockScheme(title="NVFP4", elements=("e2m1",), scales=("e4m3",), cols=16, scaling=ScalingType.BlockWise1x16),
    BlockScheme(
        title="MXFP8",
        elements=("e4m3", "e5m2"),
        scales=("e8m0",),
        cols=32,
        dtypes=("bfloat16", "float16", "float32"),
        scaling=ScalingType.BlockWise1x32,
    ),
    BlockScheme(
        title="FP8 in blocks",
        elements=("e4m3", "e5m2"),
        scales=("fp32", "pow2"),
        cols=128,
        rows=(1, 128),
        capabilities=((9, 0), (9, 1)),
        cuda=(12, 9),
        multiple=128,
        scaling=ScalingType.BlockWise1x128,
    ),
)


def scheme(spec: QuantSpec) -> BlockScheme | None:
    """The scheme of an operand, or None."""
    return next((each for each in SCHEMES if each.takes(spec)), None)


def why_not(operands: Operands, table: Table, layer: Shape, device: Device) -> str | None:
    """Why tensor cores cannot multiply these operands, which have the same scheme; None if they can."""
    first, second = operands.first, operands.second
    assert first is not None and second is not None
    kind = scheme(first)
    assert kind is not None
    if first.block == second.block == _SQUARE:
        return "scaled_mm cannot multiply two operands in blocks of 128×128"
    if device.type != "cuda":
        return f"scaled_mm multiplies {kind.title} on NVIDIA GPUs only, not on {device}"
    least, beyond = kind.capabilities
    capability = device.capability or (0, 0)
    if not least <= capability < beyond:
        needed = f"{least[0]}.x" if beyond == (least[0] + 1, 0) else f"{least[0]}.{least[1]}"
        have = ".".join(map(str, capability))
        return f"scaled_mm of {kind.title} needs compute capability {needed}; {device} has {have}"
    if device.here and (built := cuda_version()) is not None and built < kind.cuda:
        built_for, needed = (".".join(map(str, version)) for version in (built, kind.cuda))
        return f"scaled_mm of {kind.title} needs CUDA {needed}; this torch is built for CUDA {built_for}"
    if table.dtype not in kind.dtypes:
        return f"scaled_mm of {kind.title} gives {' and '.join(kind.dtypes)}, not {table.dtype}"
    for name, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if size % kind.multiple:
            return f"scaled_mm of {kind.title} needs {name} divisible by {kind.multiple}, not {size}"
    return None


def cuda_version() -> tuple[int, int] | None:
    """The version of CUDA that this torch is built for; None: for CPUs."""
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


class _Operand(NamedTuple):
    """One operand as scaled_mm takes it."""

    data: Tensor
    scales: list[Tensor]
    scaling: list[ScalingType]
    swizzle: list[SwizzleType]


def product(a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S] in `out_dtype`; both operands have the same scheme."""
    kind = scheme(a.spec)
    assert kind is not None
    width = max(x.element_width for x in (a, b))
    width += -width % kind.multiple
    factors = [x.global_decode() for x in (a, b)]
    # cuBLAS multiplies the accumulator by one number; one per row is applied to the float32 product.
    inside = all(factor is None or factor.dim() == 0 for factor in factors)
    left, right = (_operand(x, kind, width, f if inside else None) for x, f in zip((a, b), factors, strict=True))
    outside = []
    if not inside:
        outside = [f.T if index and f.dim() else f for index, f in enumerate(factors) if f is not None]
    plain = bias is None and not outside
    y = F.scaled_mm(
        left.data,
        right.data.T,
        left.scales,
        left.scaling,
        right.scales,
        right.scaling,
        left.swizzle,
        right.swizzle,
        output_dtype=out_dtype if plain else torch.float32,
        use_fast_accum=False,
    )[: a.shape[0], : b.shape[0]]
    if plain:
        return y
    for factor in outside:
        y *= factor
    return (y if bias is None else y + bias.to(out_dtype)).to(out_dtype)


def _operand(x: Quantized, kind: BlockScheme, width: int, factor: Tensor | None) -> _Operand:
    x = _padded(x, width)
    hardware = to_torch(x)
    data, scales = hardware.data, hardware.scales
    if kind.cols == 128:
        if x.spec.block == _SQUARE:
            # [K/128 rounded up to 4, rows/128], whose first axis is contiguous.
            scales = F.pad(scales, (0, -scales.shape[1] % 4)).T
            return _Operand(data, [scales], [ScalingType.BlockWise128x128], [SwizzleType.NO_SWIZZLE])
        return _Operand(data, [scales.T.contiguous().T], [kind.scaling], [SwizzleType.NO_SWIZZLE])
    if factor is None:
        return _Operand(data, [scales], [kind.scaling], [SwizzleType.SWIZZLE_32_4_4])
    return _Operand(
        data,
        [scales, factor],
        [kind.scaling, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )


def _padded(x: Quantized, width: int) -> Quantized:
    """x with zero codes up to `width` columns and a multiple of 16 rows."""
    height, cols = x.spec.block
    assert height is not None and cols is not None
    rows = -x.shape[0] % (_ROWS if height == 1 else max(_ROWS, height))
    columns = width - x.element_width
    if not rows and not columns:
        return x
    per_byte = 2 if x.spec.element == "e2m1" else 1
    blocks = -(-(x.shape[0] + rows) // height) - x.scales.shape[0]
    return x._replace(
        shape=(x.shape[0] + rows, width),
        codes=F.pad(x.codes, (0, columns // per_byte, 0, rows)),
        scales=F.pad(x.scales, (0, columns // cols, 0, blocks)),
    )
