"""Memory of compiled graphs: what the compiler overwrites changes nothing, codes and layers are
freed.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from compiled_layers import MARKS, needs_inductor, pair, same, step
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp4train as f4
from fp4train.precision import NVFP4, autocast, current, recompute
from fp4train.quantize import Quantized

pytestmark = MARKS


class Sine(nn.Module):
    """Its backward needs its input, not its output, so the compiler may reuse the memory of the
    output.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.long
@needs_inductor
def test_inductors_reuse_of_buffers_changes_nothing_that_a_layer_saved() -> None:
    """The compiler overwrites tensors that were passed to layers; wgrad in BF16 needs the old
    values.
    """
    model = f4.convert(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), Sine()) for _ in range(4))))
    recipe = NVFP4().with_high_precision("wgrad")
    x = torch.randn(64, 32)
    compiled = torch.compile(model, fullgraph=True)
    for ours, expected in zip(
        step(compiled, model, recipe, x), step(model, model, recipe, x), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


class Gated(nn.Module):
    """No x fits the memory of the previous y, so it reuses the memory of the x before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            value, gate = layer(x).chunk(2, -1)
            x = value * gate.sin()
        return x


class Reweighted(nn.Module):
    """One layer whose weight the graph computes: different values at the same address each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        self.start = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        w = self.start.sin()
        for _ in range(3):
            x = torch.func.functional_call(self.layer, {"weight": w}, (x,))
            w = (w * x.mean(0)).sin()
        return x


@pytest.mark.long
@needs_inductor
@pytest.mark.parametrize("kind", [Gated, Reweighted])
@torch.no_grad()
def test_nothing_is_remembered_of_a_tensor_that_the_compiler_may_write_into(
    kind: type[nn.Module],
) -> None:
    """Shared inputs and prepared weights are not reused by address and version, which the compiler
    does not change.
    """
    model = f4.convert(kind())
    x = torch.randn(64, 32 if kind is Gated else 64)
    compiled = torch.compile(model, fullgraph=True)
    with autocast(NVFP4(), step=1):
        expected = model(x)
        ours = compiled(x)
    assert float((ours - expected).norm() / expected.norm()) < 0.1


@pytest.mark.long
def test_codes_are_freed_by_backward_and_contexts_with_their_calls() -> None:
    model = f4.convert(pair())
    x = torch.randn(64, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with autocast(NVFP4()), torch.no_grad():
        compiled(x)
    # both graphs exist now and refer to the contexts they were traced in
    step(compiled, model, NVFP4(), x)
    gc.collect()
    gc.disable()
    before = len(codes_alive())  # those that other tests hold
    try:
        with autocast(NVFP4(), step=None):
            seen = weakref.ref(current())  # type: ignore[arg-type]
            loss = compiled(x).sum()
            with torch.no_grad():
                compiled(x)
        assert len(codes_alive()) == before + 2
        loss.backward()
        assert len(codes_alive()) == before, (
            "although the loss, and with it the graph, is still there"
        )
        del loss
        assert seen() is None
    finally:
        gc.enable()


def test_a_recomputed_graph_keeps_no_codes_of_its_first_pass() -> None:
    model = f4.convert(pair())
    x = torch.randn(64, 16, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = len(codes_alive())
    gradients = []
    for run in (compiled, partial(recompute, compiled)):
        with autocast(NVFP4(), step=0, token_offset=0):
            y = run(x)
        assert len(codes_alive()) == before + 2 * (run is compiled)
        gradients.append(torch.autograd.grad(y.sum(), x))
        assert len(codes_alive()) == before
    assert same(*gradients)


def codes_alive() -> list[Quantized]:
    return [each for each in gc.get_objects() if type(each) is Quantized]


def test_backward_twice_through_a_retained_graph_gives_the_same_twice() -> None:
    model = f4.convert(pair())
    x = torch.randn(8, 16)
    with autocast(NVFP4(), step=0):
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    loss.backward()
    assert same(tuple(once), tuple(p.grad for p in model.parameters()))  # type: ignore[misc]


@pytest.mark.long
@needs_inductor
def test_the_compilers_cache_keys_hold_no_weights() -> None:
    """A parametrized layer refuses to be pickled; a large one would take gigabytes."""
    model = nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16)
    )
    f4.convert(model)
    torch.nn.utils.parametrizations.weight_norm(model[1])
    with autocast(NVFP4(), step=0):
        torch.compile(model, fullgraph=True)(torch.randn(8, 16)).sum().backward()
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_a_layer_and_its_weight_are_freed_at_once() -> None:
    layer = f4.convert(nn.Linear(16, 16))
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()
