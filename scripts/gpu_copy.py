"""A copy by Triton, beside which kernels are measured."""

# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from fp4train.quantize.launch import Launch

BLOCK = 8192
"""Elements of a program: 32 of a thread."""


@triton.jit
def copy(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(y_ptr + place, tl.load(x_ptr + place, mask=inside), mask=inside)


def by_triton(x: Tensor, y: Tensor) -> None:
    """y becomes x, both contiguous."""
    launch = Launch(copy, -(-x.numel() // BLOCK), (x.numel(),), {"BLOCK": BLOCK}, warps=8)
    launch(x, y)
