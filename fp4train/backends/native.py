"""Products of the codes themselves on tensor cores, by torch's scaled_mm.

What `torch.nn.functional.scaled_mm` takes of A [M, K] and B [N, K], which it multiplies as A·Bᵀ
(torch 2.11, aten/src/ATen/native/cuda/ScaledBlas.cpp; layouts of scales: cuBLAS documentation,
"Narrow precision data types usage"):

| scheme | runs on | codes | scales of A, likewise of B |
|---|---|---|---|
| FP8, one scale | compute capability 8.9 and newer; CPUs | E4M3 or E5M2 | float32, of the tensor or [M, 1] |
| NVFP4 | 10.x | E2M1, two per byte | E4M3 per 1×16, in tiles of 128×4; one float32 global scale |
| MXFP8 | 10.x | E4M3 | E8M0 per 1×32, in tiles of 128×4 |
| FP8 blocks, 1×128 | 9.0 | E4M3 | float32 [M, K/128], rows adjacent in memory |
| FP8 blocks, 128×128 | 9.0 | E4M3 | float32 [⌈K/128⌉ to a multiple of 4, M/128], K adjacent; one operand only |

One of A and B is E4M3; with one scale per row on GPUs B is.

A is row-major and B column-major: both are stored with K contiguous, as `Quantized` stores them.
Square blocks of NVFP4 and MXFP8 have the scale of their block repeated for each row. Global scales
multiply the float32 accumulator, so the result is rounded once, and equals emulation up to the
order of accumulation.

On a CPU torch computes the product slowly, so it is used there only if the backend is given by
name. scaled_mm takes sizes that are multiples of 16 (32, 128): in_features and out_features must
be; tokens are padded with zero codes, whose products are zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp4train.backends.emulate import EMULATE
from fp4train.backends.protocol import Prepared
from fp4train.backends.table import Operands, Shape, Table
from fp4train.formats import E2M1, E4M3, E5M2, ElementFormat
from fp4train.hardware import Device
from fp4train.quantize import Quantized, QuantSpec, to_torch
from fp4train.text import first_line

FP8 = (E4M3, E5M2)
"""The element formats of one scale per tensor or row."""
_WHOLE = ((None, None), (1, None))
"""Blocks of one scale per tensor or row."""
_MULTIPLE = 16
"""Rows of A and B are padded to multiples of this; so are the columns of those with one scale per
tensor or row.
"""
_SQUARE = (128, 128)
_TILES = [SwizzleType.SWIZZLE_32_4_4]
_PLAIN = [SwizzleType.NO_SWIZZLE]
_TILES_AND_PLAIN = _TILES + _PLAIN


@dataclass(frozen=True, kw_only=True)
class BlockScheme:
    """One kind of block-scaled operand.

    Args:
        title: name in messages.
        elements: element formats; cols: width of a block.
        rows: heights of a block; None: any.
        capabilities: the compute capabilities that multiply it, from the first up to, but without,
            the second.
        cuda: the first version of CUDA whose cuBLAS does.
        multiple: divisor of in_features and out_features; tokens are padded to it where they are
            contracted.
        dtypes: dtypes that the product may have.
    """

    title: str
    elements: tuple[ElementFormat, ...]
    scales: tuple[str, ...]
    cols: int
    rows: tuple[int, ...] | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((10, 0), (11, 0))
    cuda: tuple[int, int] = (12, 8)
    multiple: int = 32
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    scaling: ScalingType

    @cached_property
    def kinds(self) -> list[ScalingType]:
        """The kinds of scales of an operand without a global one."""
        return [self.scaling]

    @cached_property
    def kinds_with_global(self) -> list[ScalingType]:
        return [self.scaling, ScalingType.TensorWise]

    def takes(self, spec: QuantSpec) -> bool:
        rows, cols = spec.block
        return (
            spec.format in self.elements
            and spec.scale in self.scales
            and spec.global_scale in (None, "tensor", "row")
            and cols == self.cols
            and rows is not None
            and (self.rows is None or rows in self.rows)
        )


SCHEMES = (
    BlockScheme(
        title="NVFP4",
        elements=(E2M1,),
        scales=("e4m3",),
        cols=16,
        scaling=ScalingType.BlockWise1x16,
    ),
    BlockScheme(
        title="MXFP8",
        elements=(E4M3,),
        scales=("e8m0",),
        cols=32,
        dtypes=("bfloat16", "float16", "float32"),
        scaling=ScalingType.BlockWise1x32,
    ),
    BlockScheme(
        title="FP8 in blocks",
        elements=(E4M3,),
        scales=("fp32", "pow2"),
        cols=128,
        rows=(1, 128),
        capabilities=((9, 0), (9, 1)),
        cuda=(12, 9),
        multiple=128,
        scaling=ScalingType.BlockWise1x128,
    ),
)


_BY_COLUMNS: dict[int | None, BlockScheme] = {scheme.cols: scheme for scheme in SCHEMES}
"""The scheme of operands that `Native.why_not` has nothing against, by the width of their
blocks.
"""


@functools.cache
def scheme(spec: QuantSpec) -> BlockScheme | None:
    """The scheme of a block-scaled operand, or None."""
    return next((candidate for candidate in SCHEMES if candidate.takes(spec)), None)


class Native:
    """torch's scaled_mm.

    fast: whether FP8 with one scale per tensor or row is summed in the fast accumulator, which
        keeps 14 bits.
    """

    name = "native"
    takes_codes = takes_tiles = True
    adds = False
    both = None

    def __init__(self, *, fast: bool = False) -> None:
        self.fast = fast

    def summing(self, accumulator: str) -> Native:
        return FAST if accumulator == "fast" else NATIVE

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        a_spec, b_spec = table[gemm].both
        if a_spec is None or b_spec is None:
            return "scaled_mm needs both operands quantised"
        for spec in (a_spec, b_spec):
            if spec.product_factor is not None:
                return f"scaled_mm does not undo guard={spec.guard:g} of scale={spec.scale}"
            one_scale = (
                spec.format in FP8 and spec.block in _WHOLE and spec.scale in ("fp32", "pow2")
            )
            if not one_scale and scheme(spec) is None:
                return (
                    f"scaled_mm does not take element={spec.element} block={spec.block} "
                    f"scale={spec.scale}"
                )
        kind = scheme(a_spec)
        other = scheme(b_spec)
        if (kind or a_spec.block) != (other or b_spec.block):
            return "scaled_mm needs the same kind of scale for both operands"
        if a_spec.format == b_spec.format == E5M2:
            return "scaled_mm cannot multiply E5M2 by E5M2"
        if kind is not None:
            return why_not_blocks(kind, table[gemm], table, layer, device)
        return _why_not_whole(b_spec, table, layer, device)

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """The product, as in `Backend`; operands without elements, which scaled_mm refuses, are
        emulated.
        """
        assert isinstance(a, Quantized) and isinstance(b, Quantized)
        if 0 in a.shape or 0 in b.shape:
            return EMULATE.product(a, b, out_dtype=out_dtype, bias=bias)
        try:
            if (kind := _BY_COLUMNS.get(a.spec.block[1])) is not None:
                return _product_of_blocks(kind, a, b, out_dtype, bias)
            return _product(a, b, out_dtype, bias, fast=self.fast)
        except RuntimeError as error:
            if "CUBLAS_STATUS" not in str(error):
                raise
            raise RuntimeError(
                f"cuBLAS does not multiply [{a.shape[0]}, {a.shape[1]}] by [{b.shape[0]}, "
                f"{b.shape[1]}]ᵀ of "
                f"{a.spec.element.upper()}·{b.spec.element.upper()} into {out_dtype} "
                f"({first_line(error)}); "
                "backend=emulate computes the same product"
            ) from error

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        """The product, and its sum after it."""
        total_RS += self.product(a, b, out_dtype=total_RS.dtype)

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return spec is None or spec.block != (1, None)  # one scale per row: BF16 only


NATIVE = Native()
FAST = Native(fast=True)


def _indivisible(layer: Shape, multiple: int, what: str = "") -> str | None:
    """Why the size of a layer is not one that scaled_mm takes; None if it is."""
    for name, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if size % multiple:
            return f"scaled_mm{what} needs {name} divisible by {multiple}, not {size}"
    return None


# -- FP8 with one scale per tensor or row ----------------------------------------------------------


def _why_not_whole(spec: QuantSpec, table: Table, layer: Shape, device: Device) -> str | None:
    """Why operands of one scale per tensor or row cannot be multiplied; None if they can.

    spec: that of the second.
    """
    if reason := _indivisible(layer, _MULTIPLE):
        return reason
    if device.type not in ("cpu", "cuda"):
        return f"scaled_mm is not used on {device}"
    if device.type == "cuda" and (device.capability or (0, 0)) < (8, 9):
        return (
            f"FP8 needs compute capability 8.9; {device} has "
            f"{'.'.join(map(str, device.capability or ())) or 'none'}"
        )
    if spec.block == (1, None):
        if device.type == "cuda" and spec.format == E5M2:
            return "scaled_mm with one scale per row needs E4M3 for the second operand, not E5M2"
        if device.type == "cuda" and table.dtype != "bfloat16":
            return f"scaled_mm with one scale per row writes BF16 only, not {table.dtype}"
        if device.type == "cpu" and not cpu_multiplies_rows():
            return f"torch {torch.__version__} has no scaled_mm with one scale per row on CPUs"
    return None


@functools.cache
def cpu_multiplies_rows() -> bool:
    """Whether this torch's scaled_mm takes one scale per row on CPUs; 2.11 takes one per tensor
    only.
    """
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    scales = torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.T, scale_a=scales, scale_b=scales.T, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def _product(
    a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: Tensor | None, *, fast: bool
) -> Tensor:
    rows = a.shape[0]
    columns = b.shape[0]
    a_codes, a_scales = padded(a)
    b_codes, b_scales = padded(b)
    inside = bias is not None and out_dtype != torch.float32 and columns == b_codes.shape[0]
    a_dtype = a.spec.format.dtype
    b_dtype = b.spec.format.dtype
    assert a_dtype is not None and b_dtype is not None
    y = torch._scaled_mm(
        a_codes.view(a_dtype),
        b_codes.view(b_dtype).T,
        scale_a=a_scales,
        scale_b=b_scales if b_scales.numel() == 1 else b_scales.reshape(1, -1),
        bias=bias.to(out_dtype) if bias is not None and inside else None,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    if y.shape != (rows, columns):
        y = y[:rows, :columns]
    if bias is None or inside:
        return y
    return y + bias.to(y.dtype)


def padded(x: Quantized) -> tuple[Tensor, Tensor]:
    """(codes, scales) with rows and columns padded to multiples of 16: zero codes, and scales of 1
    for added rows.
    """
    rows = -x.codes.shape[0] % _MULTIPLE
    columns = -x.codes.shape[1] % _MULTIPLE
    if not rows and not columns:
        return x.codes, x.scales
    if x.spec.block[0] == 1:
        scales = F.pad(x.scales, (0, 0, 0, rows), value=1.0)
    else:
        scales = x.scales
    return F.pad(x.codes, (0, columns, 0, rows)), scales


# -- blocks ----------------------------------------------------------------------------------------


def why_not_blocks(
    kind: BlockScheme, operands: Operands, table: Table, layer: Shape, device: Device
) -> str | None:
    """Why tensor cores cannot multiply operands of one scheme; None if they can."""
    if all(spec is not None and spec.block == _SQUARE for spec in operands.both):
        return "scaled_mm cannot multiply two operands in blocks of 128×128"
    if device.type != "cuda":
        return f"scaled_mm multiplies {kind.title} on NVIDIA GPUs only, not on {device}"
    least, beyond = kind.capabilities
    capability = device.capability or (0, 0)
    if not least <= capability < beyond:
        if beyond == (least[0] + 1, 0):
            needed = f"{least[0]}.x"
        else:
            needed = f"{least[0]}.{least[1]}"
        have = ".".join(map(str, device.capability or ())) or "none"
        return f"scaled_mm of {kind.title} needs compute capability {needed}; {device} has {have}"
    if device.here and (built := cuda_version()) is not None and built < kind.cuda:
        built_for, needed = (".".join(map(str, version)) for version in (built, kind.cuda))
        return (
            f"scaled_mm of {kind.title} needs CUDA {needed}; this torch is built for CUDA "
            f"{built_for}"
        )
    if table.dtype not in kind.dtypes:
        return f"scaled_mm of {kind.title} gives {' and '.join(kind.dtypes)}, not {table.dtype}"
    return _indivisible(layer, kind.multiple, f" of {kind.title}")


def cuda_version() -> tuple[int, int] | None:
    """The version of CUDA that this torch is built for; None: for CPUs."""
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def _product_of_blocks(
    kind: BlockScheme, a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    (rows, a_width), (columns, b_width) = a.shape, b.shape
    # scaled_mm takes scales in tiles, and sizes that need no padding.
    tiled = a.scales.dim() == b.scales.dim() == 1
    if (
        not tiled
        or rows % _MULTIPLE
        or columns % _MULTIPLE
        or a_width % kind.multiple
        or b_width % kind.multiple
    ):
        width = max(a.element_width, b.element_width)
        width += -width % kind.multiple
        a = to_torch(padded_blocks(a, width))
        b = to_torch(padded_blocks(b, width))
    a_factor = a.factor
    b_factor = b.factor
    # cuBLAS multiplies the accumulator by one number; one per row is applied to the float32
    # product.
    inside = (a_factor is None or not a_factor.dim()) and (b_factor is None or not b_factor.dim())
    added = None
    if bias is not None and inside and out_dtype != torch.float32 and columns == b.shape[0]:
        added = bias.to(out_dtype)
    plain = inside and (bias is None or added is not None)
    x_scales, x_scaling, x_swizzle = _scales(a, kind, a_factor if inside else None)
    w_scales, w_scaling, w_swizzle = _scales(b, kind, b_factor if inside else None)
    y = F.scaled_mm(
        a.codes,
        b.codes.t(),
        x_scales,
        x_scaling,
        w_scales,
        w_scaling,
        x_swizzle,
        w_swizzle,
        bias=added,
        output_dtype=out_dtype if plain else torch.float32,
        use_fast_accum=False,
    )
    if y.shape != (rows, columns):
        y = y[:rows, :columns]
    if plain:
        return y
    if not inside:
        for factor in (
            a_factor,
            b_factor if b_factor is None or not b_factor.dim() else b_factor.T,
        ):
            y = y if factor is None else y.mul_(factor)
    return (y if bias is None else y + bias.to(out_dtype)).to(out_dtype)


def _scales(
    x: Quantized, kind: BlockScheme, factor: Tensor | None
) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    """The scales of one operand, their kinds and their layouts, as scaled_mm takes them."""
    if factor is not None:
        return [x.scales, factor], kind.kinds_with_global, _TILES_AND_PLAIN
    if kind.cols != 128:
        return [x.scales], kind.kinds, _TILES
    if x.spec.block != _SQUARE:
        return [x.scales.T.contiguous().T], kind.kinds, _PLAIN
    # [K/128 rounded up to 4, rows/128], whose first axis is contiguous.
    return [F.pad(x.scales, (0, -x.scales.shape[1] % 4)).T], [ScalingType.BlockWise128x128], _PLAIN


def padded_blocks(x: Quantized, width: int, multiple: int = _MULTIPLE) -> Quantized:
    """x with zero codes up to `width` columns and a multiple of so many rows."""
    height, cols = x.spec.block
    assert height is not None and cols is not None
    rows = -x.shape[0] % (multiple if height == 1 else max(multiple, height))
    columns = width - x.element_width
    if not rows and not columns:
        return x
    per_byte = 2 if x.spec.format.packed else 1
    codes = F.pad(x.codes.view(torch.uint8), (0, columns // per_byte, 0, rows)).view(x.codes.dtype)
    x = x._replace(shape=(x.shape[0] + rows, width), codes=codes)
    if x.tiled:  # which are filled up with zeros
        return x
    blocks = -(-x.shape[0] // height) - x.scales.shape[0]
    return x._replace(scales=F.pad(x.scales, (0, columns // cols, 0, blocks)))
