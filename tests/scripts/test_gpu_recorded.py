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
    "sum over rows": lambda x: x.float().sum(0, keepdim=True).expand(LARGE) + x,
    "cast": lambda x: x.bfloat16(),
    "concatenation": lambda x: torch.cat([x, x], dim=1),
    "softmax": lambda x: x.softmax(-1),
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


def test_an_update_of_a_large_tensor_leaves_it_as_it_is() -> None:
    x = torch.ones(LARGE)
    with gpu_recorded.Uncomputed():
        result = x.mul_(3.0)
        torch._foreach_add_([x], 1.0)
    assert result is x and torch.equal(x, torch.ones(LARGE))


def test_small_tensors_and_numbers_which_decide_what_is_launched_are_computed() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    with gpu_recorded.Uncomputed():
        total = x @ x.T
        x += 1
        count = int(total.sum())
    assert count == int(
        (torch.arange(12.0).reshape(3, 4) @ torch.arange(12.0).reshape(3, 4).T).sum()
    )
    assert torch.equal(x, torch.arange(12.0).reshape(3, 4) + 1)


def test_a_shape_that_depends_on_numbers_is_computed() -> None:
    x = torch.zeros(LARGE)
    x[:3] = 1
    with gpu_recorded.Uncomputed():
        rows = x.nonzero()
    assert rows.shape == (3 * LARGE[1], 2)
