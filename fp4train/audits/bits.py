"""Comparison of tensors bit by bit, and sums of the bits of tensors."""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.quantize import Decoded

FEW: Final = 4
"""Most elements that count as single ones."""
COLUMNS: Final = 65537
"""Columns of a sum of bits: a prime, so that no stride of a tensor is a multiple of it."""
_MIXED: Final = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as int64: neighbours times it lie far apart."""
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
    """The elements whose bits differ, of which one is a number; None: there are none. Other shapes or
    dtypes differ everywhere.
    """
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        where = torch.ones(tensor.shape, dtype=torch.bool)
    else:
        where = integers(tensor) != integers(expected)
        if where.any() and tensor.is_floating_point():
            where &= ~(tensor.float().isnan() & expected.float().isnan())
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
    """A sum of a tensor's bytes in which each place has a weight of its own, modulo 2^64: int64 [].

    64-bit words are added up in `COLUMNS` columns, and the halves of each column's sum are weighted
    by odd numbers (`_weights`). One changed bit changes the sum; so do two, unless a multiple of
    `COLUMNS` words lies between them. Checkpoints hold these sums.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 or flat.numel() % 8:
        flat = F.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    rows = len(words) // COLUMNS
    if rows:
        columns = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)
        remaining = words[rows * COLUMNS :]
        columns[: len(remaining)] += remaining
    else:
        columns = words
    halves = columns.view(torch.int32)
    return (halves * _weights(halves.device)[: len(halves)]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, int64 [2 · `COLUMNS`]. With 1, 3, 5, … changes of a few last
    bits cancel, such as those of a norm at a low rate.
    """
    places = torch.arange(1, 4 * COLUMNS, 2, device=device) * _MIXED
    return ((places ^ (places >> 32)) * _MIXED) | 1
