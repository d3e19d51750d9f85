"""Hadamard transforms of both operands of every GEMM cancel in the products of a layer."""

import pytest
import torch
from torch import nn

import fp4train as f4
from fp4train.formats import ElementFormat
from fp4train.precision import Custom, Operands
from fp4train.quantize import Hadamard, QuantSpec, register

FINE = ElementFormat(name="fine_e1m6", exponent_bits=1, mantissa_bits=6, bias=1)
"""A grid of 127 steps: the finest of eight bits."""


def recipe(hadamard: Hadamard | None) -> Custom:
    spec = QuantSpec(
        element="fine_e1m6", block=(1, 16), scale="ue5m3", global_scale=None, hadamard=hadamard
    )
    pair = Operands(first=spec, second=spec)
    return Custom(fprop=pair, dgrad=pair, wgrad=pair)


@pytest.mark.parametrize("shape", [(48, 64, 32), (37, 40, 24)], ids=["whole", "padded"])
@pytest.mark.parametrize("size", [16, 32])
def test_the_products_of_turned_operands_are_those_of_the_tensors(
    shape: tuple[int, int, int], size: int
) -> None:
    """y, dx and dw with fine elements: within their error of the exact ones, turned or not; 37
    tokens and 40 and 24 features fill no group.
    """
    register(FINE)
    tokens, inputs, outputs = shape
    torch.manual_seed(0)
    layer = f4.convert(nn.Sequential(nn.Linear(inputs, outputs, bias=False)))
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16)
    dy = torch.randn(tokens, outputs, dtype=torch.bfloat16)
    w = layer[0].weight.detach()
    exact = (x.float() @ w.T, dy.float() @ w, dy.float().T @ x.float())
    for hadamard in (None, Hadamard(size=size, signs="none")):
        layer.zero_grad()
        x_leaf = x.clone().requires_grad_()
        with f4.autocast(recipe(hadamard)):
            y = layer(x_leaf)
        y.backward(dy)
        for product, expected in zip((y, x_leaf.grad, layer[0].weight.grad), exact, strict=True):
            error = (product.float() - expected).norm() / expected.norm()
            assert error < 0.02, (hadamard, error)


def test_operands_of_a_product_that_are_turned_otherwise_are_refused_by_name() -> None:
    turned = QuantSpec(hadamard=Hadamard(signs="none"))
    with pytest.raises(ValueError, match=r"dgrad: hadamard=Hadamard\(.*of dy differs from .*of w"):
        Custom(dgrad=Operands(first=turned, second=QuantSpec()))
