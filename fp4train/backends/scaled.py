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
from typing import Literal, NamedTuple

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

    def both(
        self,
        first: tuple[Decoded, Decoded],
        out: Tensor,
        second: tuple[Decoded, Decoded],
        other_out: Tensor,
        *,
        adds: bool,
    ) -> bool:
        """Write the product of the first operands, and write that of the second or add it, as
        `product` and `add` do; what surrounds those of cuBLAS is launched once for both.

        Returns:
            Whether they were made: not where cuBLAS does not make both.
        """
        term = _checked(*first, out, adds=False)
        other = _checked(*second, other_out, adds=adds)
        library = None
        if term.by_cublas and other.by_cublas:
            library = self._cublas_on(out.device)
        if library is None:
            return False
        device = out.device
        marks = other.marks()
        factors = written_factors(*first)
        other_factors = written_factors(*second)
        if factors is None or other_factors is None or adds:
            factors, other_factors = torch.empty(2, 4, dtype=torch.float32, device=device).unbind()
            kinds = term.kinds + other.kinds
            plan_factors = _plan_two_factors(kinds, other.added, device)
            plan_factors(*term.scales, factors, *other.scales, other_out, marks, other_factors)
        library.multiply(term.x, term.y, factors, out)
        library.multiply(other.x, other.y, other_factors, other_out)
        plan = _plan_corrections(term.shape, other.shape, device)
        plan(term.x, term.y, *term.scales, out, other.x, other.y, *other.scales, marks, other_out)
        if adds:
            increment_version(other_out)
        return True

    def _multiply(
        self, a: Decoded, b: Decoded, out: Tensor, bias: Tensor | None, *, adds: bool
    ) -> None:
        if bias is not None:
            if bias.shape != (len(b.values),):
                shapes = f"{tuple(bias.shape)} does not fit operand b {tuple(b.values.shape)}"
                raise ValueError(f"a bias of shape {shapes}: {(len(b.values),)} is needed")
            bias = bias.contiguous()
        term = _checked(a, b, out, adds=adds)
        library = None
        if bias is None and term.by_cublas:
            library = self._cublas_on(out.device)
        marks = out  # what is not read lies where all of them do
        if library is not None:
            marks = term.marks()
            factors = written_factors(a, b)
            if factors is None or adds:
                factors = torch.empty(2, dtype=torch.float32, device=out.device)
                plan_factors = _plan_factors(term.kinds, term.added, out.device)
                plan_factors(*term.scales, out, marks, factors)
            library.multiply(term.x, term.y, factors, out)
        added = None if bias is None else bias.dtype
        plan = _plan_product(term.shape, added, library is not None, out.device)
        plan(term.x, term.y, *term.scales, out if bias is None else bias, marks, out)

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


class _Shape(NamedTuple):
    """What the kernel of a product depends on.

    sizes: R, C, S, strides of both operands. operands: dtypes of operands and result.
    """

    sizes: tuple[int, ...]
    operands: tuple[torch.dtype, torch.dtype]
    kinds: tuple[ScaleKind, ScaleKind]
    adds: bool


class _Term(NamedTuple):
    """A product as kernels take it: x·yᵀ into `out`, or added to it."""

    x: Tensor
    y: Tensor
    scales: tuple[Tensor, Tensor]
    out: Tensor
    shape: _Shape

    @property
    def kinds(self) -> tuple[ScaleKind, ScaleKind]:
        return self.shape.kinds

    @property
    def by_cublas(self) -> bool:
        """Whether cuBLAS's product takes the operands."""
        return "row" not in self.kinds and cublas.takes(self.x) and cublas.takes(self.y)

    @property
    def added(self) -> int:
        """Numbers to which the product is added."""
        return self.out.numel() if self.shape.adds else 0

    def marks(self) -> Tensor:
        """Room for marks of these; where none are, what is not read."""
        if not self.shape.adds:
            return self.out
        return torch.empty(self.out.shape, dtype=torch.uint8, device=self.out.device)


def _checked(a: Decoded, b: Decoded, out: Tensor, *, adds: bool) -> _Term:
    """The product of two operands.

    Raises:
        ValueError: the shapes do not fit.
    """
    x = a.values
    y = b.values
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"operands {tuple(x.shape)} and {tuple(y.shape)} differ in their columns")
    if out.shape != (len(x), len(y)):
        shapes = f"operands {tuple(x.shape)} and {tuple(y.shape)}"
        raise ValueError(
            f"a sum of shape {tuple(out.shape)} does not fit {shapes}: {(len(x), len(y))} is needed"
        )
    scale = next(scale for scale in (a.scale, b.scale) if scale is not None)
    scales = scale if a.scale is None else a.scale, scale if b.scale is None else b.scale
    sizes = (*x.shape, len(y), *x.stride(), *y.stride())
    kinds = _kind(a.scale), _kind(b.scale)
    return _Term(x, y, scales, out, _Shape(sizes, (x.dtype, out.dtype), kinds, adds))


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
    for values, scale, _ in (a, b):
        if scale is None or not scale.dim():
            continue
        if scale.shape != (len(values), 1) or not scale.is_contiguous():
            return f"a scale is {tuple(scale.shape)}, not ({len(values)}, 1) in one piece"
    return why_not_here(x.device.type) or why_not_tensor(x) or why_not_tensor(y)


def written_factors(a: Decoded, b: Decoded) -> Tensor | None:
    """The factors of a·bᵀ that the kernel wrote which quantised one of them; None: none did."""
    for operand, other in ((a, b), (b, a)):
        if operand.factors is not None and operand.factors[0] is other.scale:
            return operand.factors[1]
    return None


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
def _plan_two_factors(kinds: tuple[ScaleKind, ...], added: int, device: torch.device) -> Launch:
    """As `_plan_factors`, for two products of which the second may be added."""
    from fp4train.kernels.triton.product import two_product_factors

    single = _plan_factors(kinds[2:], added, device)
    names = ("FIRST", "SECOND", "THIRD", "FOURTH")
    constants = {**dict(zip(names, kinds, strict=True)), "ADDS": added > 0}
    return Launch(two_product_factors, single.programs, single.sizes, constants, warps=1)


@lru_cache(MOST_KINDS)
def _plan_product(
    shape: _Shape, bias: torch.dtype | None, corrects: bool, device: torch.device
) -> Launch:
    """The launch for operands of this shape.

    Args:
        bias: its dtype; None: there is none.
        corrects: whether it is made only where cuBLAS's has no factor.
    """
    from fp4train.kernels.triton.product import scaled_product

    rows, depth, cols, *strides = shape.sizes
    steps = [step for step in strides if step != 1]
    if corrects:
        tile = _SMALL
    else:
        tile = tile_of((rows, cols, depth), steps, shape.adds, device)
    tile_rows, tile_cols, tile_depth, warps = tile
    variant = ProductVariant(
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        tile_depth=tile_depth,
        group=_GROUP,
        first=shape.kinds[0],
        second=shape.kinds[1],
        bias=bias is not None,
        adds=shape.adds,
        corrects=corrects,
        whole=is_whole((rows, cols, depth), tile),
        hardware=not interpreted(),
    )
    programs = min(processors(device), tiles((rows, cols), tile))
    numbers = (rows, cols, depth, *strides, programs)
    return Launch(scaled_product, programs, numbers, {"P": variant}, warps)


@lru_cache(MOST_KINDS)
def _plan_corrections(first: _Shape, second: _Shape, device: torch.device) -> Launch:
    """The launch that corrects two products of cuBLAS."""
    from fp4train.kernels.triton.product import two_scaled_products

    plan, other = (_plan_product(shape, None, True, device) for shape in (first, second))
    programs = max(plan.programs, other.programs)
    numbers = (*plan.sizes[:-1], *other.sizes[:-1], programs)
    variants = {"P": plan.constants["P"], "Q": other.constants["P"]}
    return Launch(two_scaled_products, programs, numbers, variants, plan.warps)


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
