"""Several products as one: the operands of all terms beside each other along the contraction.

    Σₜ s(aₜ)·s(bₜ)·aₜ·bₜᵀ = s(a₀)·s(b₀)·[a₀ | a₁ | …]·[b₀ | ρ₁·b₁ | …]ᵀ     ρₜ = s(aₜ)·s(bₜ) / (s(a₀)·s(b₀))

with s(·) the scale of an operand. On CPUs one product of BF16 operands, rounded once, takes a fraction
of the time of products in float32 and their sum. Columns in float32, and those that ρ multiplies,
are three columns in BF16 each, whose sum is the float32 number: its 24 bits in parts of eight.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fp4train.backends.emulate import WITHOUT_INSTRUCTIONS
from fp4train.quantize import Decoded

Term: TypeAlias = tuple[Decoded, Decoded]
"""a [R, C] and b [S, C] of a product a·bᵀ."""

COLUMNS = 32
"""What the columns of joined operands are a multiple of."""
PARTS = 3
_LARGEST = 2.0**120


def joined(terms: Sequence[Term]) -> Term | None:
    """Two operands in BF16 whose product is the sum of those of `terms`; None where there are none:
    operands on another device, or a first term in another dtype, scales of rows, CPUs without
    instructions for BF16, numbers that are not finite or that leave the range under the scale.
    """
    a, b = terms[0]
    if not (_plain(a.values) and _plain(b.values)):
        return None
    if torch.bfloat16 in WITHOUT_INSTRUCTIONS or any(map(_scaled_by_row, terms)):
        return None
    scale = _scale(terms[0])
    if not scale > 0:
        return None
    left = [a.values]
    right = [b.values]
    for term in terms[1:]:
        columns = _columns(term, _scale(term) / scale)
        if columns is None:
            return None
        left += columns[0]
        right += columns[1]
    return Decoded(_beside(left), a.scale), Decoded(_beside(right), b.scale)


def columns_of(term: Term) -> int:
    """The most columns that a term has in joined operands."""
    return PARTS**2 * term[0].values.shape[1] + COLUMNS


def _plain(values: Tensor) -> bool:
    return values.is_cpu and values.dtype is torch.bfloat16


def _scaled_by_row(term: Term) -> bool:
    return any(operand.scale is not None and operand.scale.dim() > 0 for operand in term)


def _scale(term: Term) -> float:
    factor = 1.0
    for operand in term:
        if operand.scale is not None:
            factor *= float(operand.scale)
    return factor


def _columns(term: Term, ratio: float) -> tuple[list[Tensor], list[Tensor]] | None:
    """The columns in BF16 of a term that `ratio` multiplies; None: it leaves the range."""
    a, b = (operand.values for operand in term)
    if ratio != 1.0:
        b = b.float() * ratio
    sizes = [_largest(values) for values in (a, b) if values.dtype is torch.float32]
    if not all(size < _LARGEST for size in (*sizes, math.prod(sizes))):
        return None
    left = []
    right = []
    for part_of_a in parts_of(a):
        for part_of_b in parts_of(b):
            left.append(part_of_a)
            right.append(part_of_b)
    return left, right


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def parts_of(values: Tensor) -> tuple[Tensor, ...]:
    """Tensors in BF16 whose sum is a tensor in BF16 or float32."""
    if values.dtype is torch.bfloat16:
        return (values,)
    high = values.bfloat16()
    remainder = values - high
    middle = remainder.bfloat16()
    return high, middle, (remainder - middle).bfloat16()


def _beside(columns: list[Tensor]) -> Tensor:
    """The columns in one matrix, filled up with zeros."""
    missing = -sum(values.shape[1] for values in columns) % COLUMNS
    if missing:
        columns = [*columns, columns[0].new_zeros(len(columns[0]), missing)]
    return torch.cat(columns, dim=1)
