"""A small linear layer, and its output and gradients in a recipe."""

import pytest
import torch
from prepared import sharing
from torch import Tensor, nn

from fp4train.nn import Linear, PlannedLayer
from fp4train.precision import BF16, MXFP8, NVFP4, FP8Current, FP8Row, Recipe, autocast
from fp4train.precision.settings import ConstantWeights

RECIPES = [BF16(), NVFP4(), MXFP8(), FP8Current(), FP8Row()]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(k: int = 32, n: int = 48, *, bias: bool = True, backend: str = "auto") -> Linear:
    torch.manual_seed(1)
    return Linear(k, n, bias, backend=backend)


def gradients(
    module: nn.Module,
    x: Tensor,
    recipe: Recipe,
    *,
    step: int | None = 0,
    constant: ConstantWeights | None = None,
) -> tuple[Tensor, ...]:
    """y, dx and the parameters' gradients."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(recipe, step=step, token_offset=0), sharing(constant):
        y = module(x)
    (y * rand(*y.shape, seed=9).to(y.dtype)).sum().backward()
    assert x.grad is not None
    return (
        y.detach(),
        x.grad,
        *(p.grad.clone() for p in module.parameters() if p.grad is not None),
    )


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def own_channels(module: PlannedLayer) -> Tensor:
    """The in features that the layer's own recipe multiplied in the last call."""
    every = torch.arange(module.in_features)[None]
    return module.quantised_columns(every, every)[0][0]
