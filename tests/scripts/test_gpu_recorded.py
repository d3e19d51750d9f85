"""Recording launches computes no large tensor, but leaves shapes, memory and small numbers as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (Linux only: pip install triton)")

import gpu_recorded

LARGE = 512, 256
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x @ x.T,
    "product of a transposed matrix": lambda x: x.T @ x,
    "concatenation": lambda x: torch.cat([x, x], dim=1),
    "zeros": lambda x: torch.zeros(LARGE, dtype=torch.int32),
    "view": lambda x: x.view(256, 512).T,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_large_result_has_the_shape_strides_and_dtype_that_torch_gives_it(name: str) -> None:
    x = torch.randn(LARGE)
    expected = OPERATORS[name](x)
    with gpu_recorded.Uncomputed():
        result = OPERATORS[name](x)
    described = result.shape, result.stride(), result.dtype, result.device
    assert described == (expected.shape, expected.stride(), expected.dtype, expected.device)


def test_small_tensors_are_computed_and_an_update_of_a_large_one_leaves_it() -> None:
    """Small numbers decide what is launched."""
    large = torch.ones(LARGE)
    small = torch.arange(12.0)
    with gpu_recorded.Uncomputed():
        large.mul_(3.0)
        small += 1
        total = int((small @ small).item())
    assert torch.equal(large, torch.ones(LARGE))
    assert total == sum(number**2 for number in range(1, 13))
