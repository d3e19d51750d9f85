"""Products on GPUs whose scales are applied to the float32 sum before it is rounded, without a pass
over the product.

    y [R, S] = (a [R, C] · b [S, C]ᵀ) · scale of a · scale of b + bias [S]       rounded once, or
    total   += (a · bᵀ) · scale of a · scale of b                                 in float32

Two kernels have such products:

| scales | product | bytes per element of y |
|---|---|---|
| of whole tensors, no bias | cuBLAS's, whose factor is read from the GPU (`kernels/cublas.py`) | 2; added: 8 |
| of rows, or with a bias; where cuBLAS's cannot be had | Triton's (`kernels/triton/product.py`) | 2; added: 8 |

A float32 product of torch that is scaled and rounded after it moves 18: 4 written, 8 for the first
scale, 6 for the second and the rounding; scaled and added to a sum, 32.

cuBLAS takes one factor. It is the product of both scales but where that is no normal float32 number
(both tensors below 10⁻¹⁶): there cuBLAS's factor is 0, and the programs of Triton's product, which
have nothing to do otherwise, do it.

The host decides nothing by numbers on the GPU, and nothing by a measurement. Which kernel runs
depends on

- the operands' kinds and strides;
- whether torch has loaded a cuBLAS whose products of integers are exact (`cublas.check`). A
  RuntimeError there, which
  cuBLAS or a GPU without memory may raise, leaves this process Triton's product on that GPU;
- whether the first product on a GPU lies within the capture of a CUDA graph: cuBLAS cannot be
  compared there, so
  Triton's product is recorded, until a product outside of a capture has been compared.

Ranks and resumed runs that have the same libraries and record graphs at the same steps choose
alike. Sums have the order of the kernel that makes them.

Added to a sum, cuBLAS may round product and sum together, once less than two operations do.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fp4train.kernels import cublas
from fp4train.quantize import Decoded
from fp4train.quantize.launch import Launch
from fp4train.quantize.triton import MOST_KINDS, why_not_here, why_not_tensor
from fp4train.quantize.triton_launch import interpreted, processors

ScaleKind = Literal["none", "tensor", "row"]
Way = Literal["cublas", "triton"]

Tile = tuple[int, int, int, int]
"""Rows, columns and depth of a tile, and warps of its program."""

_LARGE: Tile = (128, 256, 64, 8)
_WIDE: Tile = (128, 128, 64, 8)
_STAGED: Tile = (128, 128, 32, 8)
"""Where operands, or what is added to, take registers, too."""
_SMALL: Tile = (64, 64, 64, 4)
_INTERPRETED: Tile = (32, 32, 32, 4)
_GROUP = 8
"""Rows of tiles that are taken together."""
_HOLD_LARGE = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities whose multiprocessors have shared memory for three stages of the largest
tile.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProductVariant:
    """Constants that a product is compiled for, as one argument P; plain values, as of `Variant`.

    tile_rows, tile_cols, tile_depth: of a program's tile. group: rows of tiles that are taken
        together.
    first, second: the kinds of scales of a and b. bias: whether one is added. adds: whether to out,
        too.
    corrects: whether it is made only where the scales have no product that cuBLAS could take.
    whole: whether no tile reaches beyond the operands.
    hardware: as of `Variant`.
    """

    tile_rows: int
    tile_cols: int
    tile_depth: int
    group: int
    first: ScaleKind
    second: ScaleKind
    bias: bool
    adds: bool
    corrects: bool
    whole: bool
    hardware: bool


class ScaledProducts:
    """The products of this process, by the GPUs that they run on.

    Args:
        way: "triton": cuBLAS is not asked. Measurements compare the two.
    """

    def __init__(self, way: Way = "cublas") -> None:
        self._way = way
        self._cublas: dict[torch.device, cublas.Cublas | None] = {}
        self._refusals: dict[torch.device, str] = {}

    def product(
        self, a: Decoded, b: Decoded, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """a [R, C] times bᵀ [C, S], of operands for which `why_not` has no reason.

        Args:
            bias: [S], in `out_dtype`.

        Raises:
            ValueError: the shapes do not fit.
        """
        out = torch.empty(
            a.values.shape[0], b.values.shape[0], dtype=out_dtype, device=a.values.device
        )
        self._multiply(a, b, out, bias, adds=False)
        return out

    def add(self, total_RS: Tensor, a: Decoded, b: Decoded) -> None:
        """Add the product to `total_RS`, contiguous float32.

        Raises:
            ValueError: the shapes do not fit, or `total_RS` is not contiguous float32.
        """
        if total_RS.dtype is not torch.float32 or not total_RS.is_contiguous():
            strides = f"{total_RS.dtype} with strides {total_RS.stride()}"
            raise ValueError(f"a product is added to contiguous float32, not to {strides}")
        self._multiply(a, b, total_RS, None, adds=True)
        increment_version(total_RS)  # autograd does not see what is written by address

    def why_triton(self, device: torch.device) -> str | None:
        """Why Triton makes every product on this device; None: cuBLAS makes those that it can
        take.
        """
        if self._cublas_on(device) is not None:
            return None
        if self._way == "triton":
            return "cuBLAS is not asked"
        if device.type != "cuda":
            return f"cuBLAS does not run on {device}"
        return self._refusals.get(
            device, "a CUDA graph is captured, and cuBLAS was not compared before"
        )

    def _multiply(
        self, a: Decoded, b: Decoded, out: Tensor, bias: Tensor | None, *, adds: bool
    ) -> None:
        kinds = _kind(a.scale), _kind(b.scale)
        x = a.values
        y = b.values
        if x.shape[1] != y.shape[1]:
            raise ValueError(
                f"operands {tuple(x.shape)} and {tuple(y.shape)} differ in their columns"
            )
        if out.shape != (len(x), len(y)):
            shapes = f"operands {tuple(x.shape)} and {tuple(y.shape)}"
            raise ValueError(
                f"a sum of shape {tuple(out.shape)} does not fit {shapes}: {(len(x), len(y))} "
                "is needed"
            )
        if bias is not None:
            if bias.shape != (len(y),):
                shapes = f"{tuple(bias.shape)} does not fit operand b {tuple(y.shape)}"
                raise ValueError(f"a bias of shape {shapes}: {(len(y),)} is needed")
            bias = bias.contiguous()
        scale = next(scale for scale in (a.scale, b.scale) if scale is not None)
        scales = scale if a.scale is None else a.scale, scale if b.scale is None else b.scale
        library = None
        if "row" not in kinds and bias is None and cublas.takes(x) and cublas.takes(y):
            library = self._cublas_on(x.device)
        marks = out  # what is not read lies where all of them do
        if library is not None:
            factors = torch.empty(2, dtype=torch.float32, device=x.device)
            if adds:
                marks = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
            plan_factors = _plan_factors(kinds, out.numel() if adds else 0, x.device)
            plan_factors(*scales, out, marks, factors)
            library.multiply(x, y, factors, out)
        sizes = (*x.shape, len(y), *x.stride(), *y.stride())
        operands = x.dtype, out.dtype, None if bias is None else bias.dtype
        plan = _plan_product(sizes, operands, kinds, adds, library is not None, x.device)
        plan(x, y, *scales, out if bias is None else bias, marks, out)

    def _cublas_on(self, device: torch.device) -> cublas.Cublas | None:
        """cuBLAS, if its products of integers are right; compared before the first product of this
        process there.
        """
        if device.type != "cuda" or self._way == "triton":
            return None
        if device not in self._cublas:
            with torch.cuda.device(device):
                if torch.cuda.is_current_stream_capturing():
                    return None  # nothing can be compared within a graph
                try:
                    library = cublas.load()
                    cublas.check(library, device)
                    self._cublas[device] = library
                except RuntimeError as error:
                    _log.info("scaled products run on Triton: %s", error)
                    self._cublas[device] = None
                    self._refusals[device] = str(error)
        return self._cublas[device]


def why_not(a: Decoded, b: Decoded, out_dtype: torch.dtype) -> str | None:
    """Why no kernel here multiplies these operands and applies their scales; None: one does."""
    x = a.values
    y = b.values
    if a.scale is None and b.scale is None:
        return "there are no scales"
    if any(scale is not None and scale.dtype is not torch.float32 for scale in (a.scale, b.scale)):
        return "a scale is not float32"
    if x.dtype is not y.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return f"the operands are {x.dtype} and {y.dtype}"
    if out_dtype not in (x.dtype, torch.float32):
        return f"the result is {out_dtype}"
    for values, scale in (a, b):
        if scale is None or not scale.dim():
            continue
        if scale.shape != (len(values), 1) or not scale.is_contiguous():
            return f"a scale is {tuple(scale.shape)}, not ({len(values)}, 1) in one piece"
    return why_not_here(x.device.type) or why_not_tensor(x) or why_not_tensor(y)


def _kind(scale: Tensor | None) -> ScaleKind:
    if scale is None:
        return "none"
    return "row" if scale.dim() else "tensor"


@lru_cache(MOST_KINDS)
def _plan_factors(kinds: tuple[ScaleKind, ScaleKind], added: int, device: torch.device) -> Launch:
    """The launch for a product that is added to so many numbers, or to none."""
    from fp4train.kernels.triton.product import MARKED, product_factors

    blocks = -(-added // MARKED.value)
    programs = max(1, min(processors(device), blocks))
    constants = {"FIRST": kinds[0], "SECOND": kinds[1], "ADDS": added > 0}
    return Launch(product_factors, programs, (added, blocks, programs), constants, warps=1)


@lru_cache(MOST_KINDS)
def _plan_product(
    sizes: tuple[int, ...],
    operands: tuple[torch.dtype | None, ...],
    kinds: tuple[ScaleKind, ScaleKind],
    adds: bool,
    corrects: bool,
    device: torch.device,
) -> Launch:
    """The launch for operands of these sizes (R, C, S, strides) and dtypes of operands, result and
    bias.
    """
    from fp4train.kernels.triton.product import scaled_product

    rows, depth, cols, *strides = sizes
    steps = [step for step in strides if step != 1]
    if corrects:
        tile = _SMALL
    else:
        tile = tile_of((rows, cols, depth), steps, adds, device)
    tile_rows, tile_cols, tile_depth, warps = tile
    variant = ProductVariant(
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        tile_depth=tile_depth,
        group=_GROUP,
        first=kinds[0],
        second=kinds[1],
        bias=operands[2] is not None,
        adds=adds,
        corrects=corrects,
        whole=is_whole((rows, cols, depth), tile),
        hardware=not interpreted(),
    )
    programs = min(processors(device), tiles((rows, cols), tile))
    numbers = (rows, cols, depth, *strides, programs)
    return Launch(scaled_product, programs, numbers, {"P": variant}, warps)


def tile_of(
    sizes: tuple[int, int, int], steps: Sequence[int], adds: bool, device: torch.device
) -> Tile:
    """The largest tile that leaves no multiprocessor idle and no register in memory, or the
    smallest.

    Args:
        sizes: R, S, C.
        steps: the strides of both operands that are not 1.
        adds: whether the tile of what is added to is in registers, too.
    """
    if interpreted():
        return _INTERPRETED
    if adds or not is_whole(sizes, _LARGE) or any(step % 16 for step in steps):
        choices = [_STAGED]
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) not in _HOLD_LARGE:
        choices = [_WIDE]
    else:
        choices = [_LARGE, _WIDE]
    return next((tile for tile in choices if tiles(sizes, tile) >= processors(device)), _SMALL)


def is_whole(sizes: tuple[int, int, int], tile: Tile) -> bool:
    """Whether tiles cover matrices of R, S and C without reaching beyond them."""
    return all(size % extent == 0 for size, extent in zip(sizes, tile[:3], strict=True))


def tiles(sizes: tuple[int, ...], tile: Tile) -> int:
    """How many tiles cover a product of R and S."""
    return -(-sizes[0] // tile[0]) * -(-sizes[1] // tile[1])
