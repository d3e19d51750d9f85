"""Small models for torch.compile, one step of them, and the marks of such tests."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.precision import BF16, LayerPolicy, Recipe, autocast, compile_context

needs_graphs = pytest.mark.skipif(
    compile_context.UNAVAILABLE is not None, reason=str(compile_context.UNAVAILABLE)
)
"""Layers are part of graphs; test_uncompiled_layers.py has what holds on a torch where they are
not.
"""
COMPILER = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # All are the compiler's own.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning"),
]
MARKS = [*COMPILER, needs_graphs]
POLICY = LayerPolicy(last=1)
needs_inductor = pytest.mark.skipif(  # tests/house/test_skips.py fails where that must not be
    shutil.which("g++") is None, reason="inductor needs a C++ compiler, which no package brings"
)


def graphs() -> int:
    """Graphs compiled so far, in pieces or whole."""
    return int(counters["stats"]["unique_graphs"])


def llama(*, recompute: bool = False) -> nn.Module:
    shape = Llama(layers=3, width=32, heads=2, kv_heads=1, recompute=recompute)
    return f4.convert(shape.build(vocab_size=64, seq_len=16))


def step(
    module: nn.Module,
    model: nn.Module,
    recipe: Recipe | None,
    *inputs: Tensor,
    at: int | None = 0,
    policy: LayerPolicy | None = None,
) -> tuple[Tensor, ...]:
    """Output and gradients of one step; `recipe` None: outside of autocast."""
    model.zero_grad()
    with autocast(
        recipe or BF16(), step=at, token_offset=0, seed=5, policy=policy, enabled=recipe is not None
    ):
        y = module(*inputs)
    y.square().sum().backward()
    return (y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None))


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tokens(rows: int = 2) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (rows, 17))
    return drawn[:, :-1], drawn[:, 1:]


def pair(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32, bias=bias), nn.ReLU(), nn.Linear(32, 16, bias=bias))
