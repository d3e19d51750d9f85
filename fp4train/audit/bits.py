"""Comparison of tensors bit by bit, and sums of the bits of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp4train.quantize import Decoded

FEW: Final = 4
"""Most elements that count as single ones."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Elements of a tensor that differ from what is expected.

    Args:
        count: their number.
        total: number of all elements.
        first: index of the first one.
        where: bool of the tensor's shape.
    """

    count: int
    total: int
    first: tuple[int, ...]
    where: Tensor

    @property
    def share(self) -> float:
        return self.count / max(self.total, 1)


def integers(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer."""
    tensor = tensor.detach().contiguous()
    return tensor.view(_INTEGERS[tensor.element_size()])


def difference(tensor: Tensor, expected: Tensor) -> Difference | None:
    """The elements whose bits differ; None: all are equal. Other shapes or dtypes differ
    everywhere.
    """
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        where = torch.ones(tensor.shape, dtype=torch.bool)
    else:
        where = integers(tensor) != integers(expected)
    return where_differing(where)


def where_differing(where: Tensor) -> Difference | None:
    """The elements for which `where` is True; None: there are none."""
    count = int(where.sum())
    if not count:
        return None
    index = where.nonzero()[0].tolist()
    return Difference(count, where.numel(), tuple(index), where)


def changed_elements(expected: Tensor, values: Tensor, where: Tensor) -> str:
    """The elements that differ: "0.5 → 1, 2 → 4"."""
    pairs = zip(expected[where].tolist(), values[where].tolist(), strict=True)
    return ", ".join(f"{planned:.4g} → {value:.4g}" for planned, value in pairs)


def equal(a: Decoded, b: Decoded) -> bool:
    """Whether two decoded operands have the same bits."""
    if (a.scale is None) != (b.scale is None):
        return False
    if difference(a.values, b.values) is not None:
        return False
    if a.scale is None or b.scale is None:
        return True
    return difference(a.scale.reshape(-1), b.scale.reshape(-1)) is None


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bytes, read as 64-bit integers, modulo 2^64: int64 [].

    One changed bit changes it.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # a view as 64-bit integers begins at a multiple of their size
    aligned = flat.numel() // 8 * 8
    if aligned and aligned == flat.numel():
        return flat.view(torch.int64).sum()
    total = flat[aligned:].sum(dtype=torch.int64)
    if aligned:
        total = total + flat[:aligned].view(torch.int64).sum()
    return total
