"""Products of quantised operands as the tensor cores of a GPU sum them, to the bit.

Emulated products are exact up to the rounding of float32 sums. A tensor core aligns the products of
a block, and the sum so far, at the largest exponent E among them, cuts each off below 2^(E -
fraction), and adds the rest exactly:

    terms <- sum over the block of trunc(a·b · 2^(fraction-E))
    sum <- cut( terms + trunc(sum · 2^(fraction-E)) ) · 2^(E-fraction)

`cut` keeps so many bits below the leading one, toward zero. The exponent of a product is the sum of
the exponents of its factors, scales included; a subnormal factor has the exponent of its format's
smallest normal number; products that are zero have none. `chain` products of a row go through one
such chain; chains are added in float32.

    unit             block  fraction  kept   E, at least
    Hopper, FP8         32        13    13          -132
    Ada, FP8            16        13    13          -132
    Blackwell, FP8      32        25    23          -126    also MXFP8
    Blackwell, FP4      64        35    23          -126    sums of 16 products are exact, and aligned by their scales

On Hopper and Ada the fast accumulator is one chain over all of K; the other one
(`use_fast_accum=False`) begins a chain every 128 products. Where both operands have a float32 scale
for each 128 of K, as scaled_mm and TE multiply on Hopper, a chain sums bare codes, and the scales
of its blocks multiply it in float32. A GPU that splits K over several blocks of threads adds their
chains in an order of its own.

How other GPUs sum, of compute capability 10.3 and 12.0 for example, is not known here.

Sources: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv 2512.07004, and the
package mmaemu, which was compared with an H100, for Hopper and Ada; Microsoft's MMA-Sim, arXiv
2511.10909, for Blackwell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp4train.formats import E2M1, E4M3, E5M2, ElementFormat, decode
from fp4train.quantize import Quantized

SAMPLED = 32
"""Rows of each operand in which `error_share` looks."""
_ZERO = -(1 << 20)
"""The exponent of zero: below that of every other number."""


@dataclass(frozen=True, kw_only=True)
class TensorCore:
    """A unit of a GPU that multiplies codes.

    Args:
        name: the GPUs that have it, and the formats of its codes.
        elements: element formats of its operands.
        block: products that are summed at once.
        fraction: bits below the largest exponent that a term keeps.
        kept: bits below its own leading one that a sum keeps.
        least: the smallest exponent that terms are aligned at.
        exact: neighbouring products that are summed exactly, and then count as one term.
        restart: products of a chain without the fast accumulator; None: one chain in any case.
    """

    name: str
    elements: frozenset[ElementFormat]
    block: int
    fraction: int
    kept: int
    least: int
    exact: int = 1
    restart: int | None = None

    def add(self, total_MN: Tensor, terms_MNT: Tensor, exponents_MNT: Tensor) -> Tensor:
        """The sum after a block, float64 [M, N] with values of float32.

        Args:
            total_MN: the sum so far.
            terms_MNT: terms of the block, float64, exact.
            exponents_MNT: their exponents, int64.
        """
        exponents_MNT = torch.where(terms_MNT == 0, _ZERO, exponents_MNT)
        largest = torch.maximum(exponents_MNT.amax(-1), _exponents(total_MN)).clamp_min(self.least)
        quantum = _power_of_two(largest - self.fraction)
        aligned = torch.trunc(terms_MNT / quantum.unsqueeze(-1)).sum(-1)
        total_MN = (aligned + torch.trunc(total_MN / quantum)) * quantum
        grid = _power_of_two(_exponents(total_MN).clamp_min(-126) - self.kept)
        return torch.trunc(total_MN / grid) * grid + 0.0  # no sum is -0


_FP8 = frozenset({E4M3, E5M2})
HOPPER_FP8 = TensorCore(
    name="Hopper, FP8", elements=_FP8, block=32, fraction=13, kept=13, least=-132, restart=128
)
ADA_FP8 = TensorCore(
    name="Ada, FP8", elements=_FP8, block=16, fraction=13, kept=13, least=-132, restart=128
)
BLACKWELL_FP8 = TensorCore(
    name="Blackwell, FP8", elements=_FP8, block=32, fraction=25, kept=23, least=-126
)
BLACKWELL_FP4 = TensorCore(
    name="Blackwell, FP4",
    elements=frozenset({E2M1}),
    block=64,
    fraction=35,
    kept=23,
    least=-126,
    exact=16,
)
UNITS = {(8, 9): (ADA_FP8,), (9, 0): (HOPPER_FP8,), (10, 0): (BLACKWELL_FP8, BLACKWELL_FP4)}
"""Compute capability → the units whose sums are known."""


def unit_for(capability: tuple[int, int], element: ElementFormat) -> TensorCore | None:
    """The unit of a GPU that multiplies codes of this element format; None: how it sums is not
    known here.
    """
    units = UNITS.get(capability, ())
    return next((unit for unit in units if element in unit.elements), None)


def product(
    a: Quantized,
    b: Quantized,
    unit: TensorCore,
    *,
    fast: bool = False,
    splits: int = 1,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """a·bᵀ as the unit sums it, float32 [M, N], with the factors of tensors and rows applied.

    Args:
        a, b: operands [M, K] and [N, K], with finite codes; block scales, or one scale of the
            tensor.
        fast: whether Hopper's and Ada's sums are one chain over K.
        splits: parts of K that have chains of their own, each of whole runs of 128, added in their
            order.
        rows, columns: the rows and columns of the product that are computed; None: all.

    Raises:
        ValueError: the unit does not multiply these codes.
    """
    for operand in (a, b):
        if operand.spec.format not in unit.elements:
            raise ValueError(
                f"{unit.name}: the unit does not multiply {operand.spec.element.upper()}"
            )
    chain = _scaled_chain(a, b, unit)
    left = _factor(a, rows, chain)
    right = _factor(b, columns, chain)
    sizes = len(left.values_RK), len(right.values_RK)
    total_MN = torch.zeros(sizes, dtype=torch.float32, device=a.codes.device)
    for start, stop in _parts(left.values_RK.shape[1], splits):
        total_MN = total_MN + _sum_of(left, right, start, stop, unit, fast)
    # cuBLAS multiplies the sum by one number, in float32.
    scale = _both_scales(left, right).float()
    return (total_MN.double() * scale.double() + 0.0).float()


def exact_product(a: Quantized, b: Quantized) -> Tensor:
    """a·bᵀ summed in float64 and rounded once, float32 [M, N]; `product` has the same operands."""
    left = _factor(a)
    right = _factor(b)
    return (left.values_RK @ right.values_RK.T * _both_scales(left, right)).float()


def _both_scales(left: _Factor, right: _Factor) -> Tensor:
    """The product of the factors of both tensors, or of their rows, float64."""
    right_scale = right.scale.T if right.scale.dim() else right.scale
    return left.scale.double() * right_scale.double()


def error_share(a: Quantized, b: Quantized, unit: TensorCore, *, fast: bool = False) -> float:
    """The largest error of the unit's sums, as a share of Σ|a|·|b|, in at most `SAMPLED` rows of
    each operand; NaN where codes are not finite.
    """
    rows = _sampled_rows(a)
    columns = _sampled_rows(b)
    chain = _scaled_chain(a, b, unit)
    left = _factor(a, rows, chain)
    right = _factor(b, columns, chain)
    sums_MN = _sum_of(left, right, 0, left.values_RK.shape[1], unit, fast).double()
    left_RK = _factor(a, rows).values_RK
    right_RK = _factor(b, columns).values_RK
    exact_MN = left_RK @ right_RK.T
    magnitude_MN = left_RK.abs() @ right_RK.abs().T
    smallest = torch.finfo(torch.float64).tiny
    return float(((sums_MN - exact_MN).abs() / magnitude_MN.clamp_min(smallest)).max())


def _scaled_chain(a: Quantized, b: Quantized, unit: TensorCore) -> int | None:
    """Products of a chain that is scaled as a whole; None: the unit aligns products with their
    scales.
    """
    widths = a.spec.block[1], b.spec.block[1]
    return unit.restart if widths == (unit.restart, unit.restart) else None


def _sampled_rows(operand: Quantized) -> Tensor:
    last = operand.shape[0] - 1
    count = min(operand.shape[0], SAMPLED)
    return torch.linspace(0, last, count, device=operand.codes.device).long()


class _Factor(NamedTuple):
    """An operand as the unit takes it.

    Args:
        values_RK: element times block scale, float64, exact; elements alone where chains are scaled.
        exponents_RK: their exponents, of element and scale together, int64.
        scale_exponents_RK: exponents of the scale alone, int64.
        scale: factor of the whole tensor, float32, 0-d, or of its rows [R, 1].
        chain_scales_RC: scales of chains, float64; None: chains are not scaled.
    """

    values_RK: Tensor
    exponents_RK: Tensor
    scale_exponents_RK: Tensor
    scale: Tensor
    chain_scales_RC: Tensor | None = None


def _factor(
    operand: Quantized, rows: Tensor | None = None, scaled_chain: int | None = None
) -> _Factor:
    """The operand, or these rows of it.

    Args:
        scaled_chain: `_scaled_chain` of the product.
    """
    spec = operand.spec
    if rows is None:
        rows = torch.arange(operand.shape[0], device=operand.codes.device)
    elements_RK = decode(operand.element_codes[rows], spec.format, torch.float64)
    element_exponents_RK = _exponents(elements_RK).clamp_min(spec.format.min_exponent)
    height, width = spec.block
    if width is None:
        no_exponents_RK = torch.zeros_like(element_exponents_RK)
        scale = operand.scales.reshape(()) if height is None else operand.scales[rows]
        return _Factor(elements_RK, element_exponents_RK, no_exponents_RK, scale)
    global_scale = operand.global_decode()
    if global_scale is None:
        global_scale = torch.ones((), device=elements_RK.device)
    if global_scale.numel() > 1:
        global_scale = global_scale.reshape(-1, 1)[rows]
    else:
        global_scale = global_scale.reshape(())
    scales_RC = operand.block_scales().double()[rows // (height or len(operand.codes))]
    if width == scaled_chain:
        no_exponents_RK = torch.zeros_like(element_exponents_RK)
        return _Factor(elements_RK, element_exponents_RK, no_exponents_RK, global_scale, scales_RC)
    scales_RK = scales_RC.repeat_interleave(width, dim=1)[:, : elements_RK.shape[1]]
    smallest = int(math.log2(spec.scale_format.smallest_normal))
    scale_exponents_RK = _exponents(scales_RK).clamp_min(smallest)
    return _Factor(
        elements_RK * scales_RK,
        element_exponents_RK + scale_exponents_RK,
        scale_exponents_RK,
        global_scale,
    )


def _parts(width: int, splits: int) -> Iterator[tuple[int, int]]:
    """First and last column, exclusive, of each part of K."""
    runs = -(-width // 128)
    part = 128 * -(-runs // splits)
    yield from ((start, min(start + part, width)) for start in range(0, width, part))


def _sum_of(
    left: _Factor, right: _Factor, start: int, stop: int, unit: TensorCore, fast: bool
) -> Tensor:
    """The sum over the columns [start, stop), float32 [M, N]."""
    if unit.restart is None or (fast and left.chain_scales_RC is None):
        chain = stop - start
    else:
        chain = unit.restart
    rows = left.values_RK.shape[0]
    columns = right.values_RK.shape[0]
    sum_MN = torch.zeros(rows, columns, device=left.values_RK.device)
    for begin in range(start, stop, chain):
        total_MN = torch.zeros(rows, columns, dtype=torch.float64, device=left.values_RK.device)
        end = min(begin + chain, stop)
        for place in range(begin, end, unit.block):
            block = slice(place, min(place + unit.block, end))
            total_MN = unit.add(total_MN, *_terms(left, right, block, unit))
        chain_MN = total_MN.float()
        if left.chain_scales_RC is not None and right.chain_scales_RC is not None:
            left_scales_M = left.chain_scales_RC[:, begin // chain].float()
            right_scales_N = right.chain_scales_RC[:, begin // chain].float()
            chain_MN = chain_MN * (left_scales_M[:, None] * right_scales_N[None, :])
        sum_MN = sum_MN + chain_MN
    return sum_MN


def _terms(left: _Factor, right: _Factor, block: slice, unit: TensorCore) -> tuple[Tensor, Tensor]:
    """(terms of a block, float64 [M, N, T], their exponents)."""
    terms_MNT = left.values_RK[:, None, block] * right.values_RK[None, :, block]
    if unit.exact == 1:
        exponents_MNT = left.exponents_RK[:, None, block] + right.exponents_RK[None, :, block]
        return terms_MNT, exponents_MNT
    groups = terms_MNT.shape[-1] // unit.exact
    shape = (*terms_MNT.shape[:2], groups, unit.exact)
    group_starts = slice(block.start, block.stop, unit.exact)
    left_exponents = left.scale_exponents_RK[:, None, group_starts]
    right_exponents = right.scale_exponents_RK[None, :, group_starts]
    return terms_MNT.view(shape).sum(-1), left_exponents + right_exponents


def _exponents(x: Tensor) -> Tensor:
    """floor(log2 |x|), int64; far below all others for zero."""
    return torch.where(x == 0, _ZERO, torch.frexp(x).exponent.to(torch.int64) - 1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^e of normal float64 numbers, exact on every device."""
    return ((exponents + 1023) << 52).view(torch.float64)
