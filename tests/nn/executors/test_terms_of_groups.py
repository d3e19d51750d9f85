"""Operands of two terms of several weights: layers that read one tensor, experts without tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.backends import Operands
from fp4train.nn import Experts
from fp4train.precision import NVFP4, Custom, LayerPolicy, LayerRecipe, Residual, autocast
from fp4train.quantize import QuantSpec

PLAIN = QuantSpec()
M, K, N = 48, 64, 32


def normal(rows: int, columns: int, mean: float) -> Tensor:
    """BF16 [rows, columns], whose columns have means of this size beside a spread of 1."""
    generator = torch.Generator().manual_seed(1)
    means = mean * torch.randn(1, columns, generator=generator)
    return (torch.randn(rows, columns, generator=generator) + means).bfloat16()


class TwoReaders(nn.Module):
    """Two layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(K, N, bias=False)
        self.b = nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_a_layer_that_needs_the_mean_of_x_takes_none_from_one_that_does_not() -> None:
    """wgrad of `b`, whose dy is centred, adds the product of both means."""
    x = normal(M, K, 20.0)
    dy = normal(M, N, 20.0)
    centred = NVFP4(centred=("dy",), stochastic_rounding=False)
    residual = replace(centred, centred=(), residual=Residual())
    policy = LayerPolicy(last=0, recipes=[LayerRecipe(layers=["b"], recipe=centred)])
    gradients = []
    for recipe in (residual, centred):
        torch.manual_seed(0)
        module = f4.convert(TwoReaders())
        with autocast(recipe, policy=policy, step=0):
            y = module(x)
        y.backward(dy)
        gradients.append(module.b.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, held=4)], ids=["plain", "held"])
def test_an_expert_without_tokens_does_no_harm_to_residuals(spec: QuantSpec) -> None:
    """With held amaxes its products are made, of no rows."""
    x = normal(M, K, 0.0)
    torch.manual_seed(0)
    experts = Experts(3, K, N)
    operands = Operands(first=spec, second=spec)
    residual = Residual(tensors=("x", "w"), spec=PLAIN, share=0.1)
    recipe = Custom(fprop=operands, dgrad=operands, wgrad=operands, residual=residual)
    leaf = x.clone().requires_grad_()
    with autocast(recipe, step=0):
        y = experts(leaf, [16, 0, 32])
    y.float().square().sum().backward()
    assert leaf.grad is not None and experts.weight.grad is not None
    assert y.isfinite().all() and leaf.grad.isfinite().all()
    assert experts.weight.grad.isfinite().all() and not experts.weight.grad[1].any()
