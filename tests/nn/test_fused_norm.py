"""The gradient of a norm's result: the sum of those of the layers that read it."""

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp4train.nn.engine import LayerFunction
from fp4train.nn.fused_norm import NormedCall


class CountedLayer:
    """An executor's passes in BF16; `living` has, for each backward pass, how many of the gradients
    of x are alive when it begins.
    """

    adds = False

    def __init__(self, gradients: list[Any], living: list[int]) -> None:
        self.gradients = gradients
        self.living = living

    def forward(
        self, x_MK: Tensor, w_NK: Tensor, bias_N: None, call: Any, prepare: Any
    ) -> tuple[Tensor, Any]:
        row, column = prepare(x_MK)
        return row @ w_NK.T, (w_NK, column)

    def backward(
        self, dy_MN: Tensor, saved: Any, call: Any, total: None, prepare: None
    ) -> tuple[Tensor, Tensor, None]:
        w_NK, x_MK = saved
        self.living.append(alive(self.gradients))
        dx_MK = dy_MN @ w_NK
        self.gradients.append(weakref.ref(dx_MK))
        return dx_MK, dy_MN.T @ x_MK, None


class IdentityNorm:
    """n = x."""

    def __init__(self, gradients: list[Any], living: list[int]) -> None:
        self.gradients = gradients
        self.living = living

    def codes(self, x: Tensor, change: None, weight_K: Tensor) -> tuple[Any, Tensor, Tensor]:
        return (x.detach(), x.detach()), x, x.new_ones(x.shape[0])

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.living.append(alive(self.gradients))
        return dn.clone(), torch.zeros_like(weight_K)


def alive(tensors: list[Any]) -> int:
    return sum(tensor() is not None for tensor in tensors)


def test_the_gradients_of_many_readers_are_summed_in_autograds_order_in_one_tensor() -> None:
    """That of the last reader first, each rounded to BF16: another order has other bits."""
    torch.manual_seed(0)
    x = torch.randn(16, 8).bfloat16().requires_grad_()
    weight_K = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(4, 8).bfloat16().requires_grad_() for _ in range(4)]
    dys = [torch.randn(16, 4).bfloat16() for _ in range(4)]
    gradients: list[Any] = []
    living: list[int] = []
    layer = CountedLayer(gradients, living)
    calls: Any = [SimpleNamespace(executor=layer, wants=lambda *_: None) for _ in weights]
    parameters = [tensor for w_NK in weights for tensor in (w_NK, None)]
    norm = IdentityNorm(gradients, living)
    normed = NormedCall(norm, calls)
    *outputs, _ = LayerFunction.apply(normed, x, None, weight_K, *parameters)  # type: ignore[no-untyped-call]
    torch.autograd.backward(outputs, dys)
    leaf = x.detach().requires_grad_()
    torch.autograd.backward([leaf @ w_NK.detach().T for w_NK in weights], dys)
    assert x.grad is not None and leaf.grad is not None
    assert torch.equal(x.grad, leaf.grad)
    assert living == [0, 1, 1, 1, 1]
