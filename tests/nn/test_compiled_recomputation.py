"""Recomputed regions in torch.compile: each repeats the calls of its first pass, or is refused."""

from __future__ import annotations

import pytest
import torch
from compiled_layers import MARKS, POLICY, graphs, llama, pair, same, step, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4train as f4
from fp4train.precision import NVFP4, FP8Delayed, Recipe, autocast

pytestmark = MARKS


def test_recomputed_regions_are_graphs_of_their_own_with_the_same_bits() -> None:
    model = llama(recompute=True)
    data = tokens()
    eager = step(model, model, NVFP4(), *data, policy=POLICY)
    assert same(
        step(torch.compile(model, backend="aot_eager"), model, NVFP4(), *data, policy=POLICY), eager
    )
    assert graphs() > 0


class Checkpointed(nn.Module):
    """torch's own recomputation, which the compiler includes in the graph."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner = inner
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch_checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[assignment]
        return x


@pytest.mark.parametrize(
    "recipe", [NVFP4(), NVFP4(backward="dequantised"), FP8Delayed()], ids=lambda r: r.name
)
def test_recomputation_inside_of_a_graph_finds_the_call_that_it_repeats(recipe: Recipe) -> None:
    """The context has ended when the graph's backward runs; without a step each call draws its own
    random bits, and a delayed amax must enter its history once.
    """
    states = []
    for through in (
        lambda model: model,
        lambda model: torch.compile(Checkpointed(model), backend="aot_eager"),
    ):
        torch.manual_seed(0)
        model = f4.convert(pair())
        results = [
            step(through(model), model, recipe, torch.ones(16, 16), at=None) for _ in range(2)
        ]
        states.append((results, [m.scaling_state() for m in model if isinstance(m, f4.nn.Linear)]))
    (eager, eager_state), (compiled, compiled_state) = states
    assert all(same(a, b) for a, b in zip(eager, compiled, strict=True))
    for a, b in zip(eager_state, compiled_state, strict=True):
        assert same(tuple(a.values()), tuple(b.values()))


@pytest.mark.long
def test_a_layer_recomputed_by_a_graph_that_called_it_twice_is_refused() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(16, 16)))
    compiled = torch.compile(Checkpointed(model, times=2), backend="aot_eager")
    with pytest.raises(
        RuntimeError, match=r"0 was called 2 times in the forward pass that a graph recomputes"
    ):
        step(compiled, model, NVFP4(), torch.ones(8, 16))


@pytest.mark.long
@pytest.mark.parametrize("recipe", [NVFP4(), FP8Delayed()], ids=lambda r: r.name)
def test_compiled_blocks_inside_of_recomputed_regions_draw_what_the_first_pass_drew(
    recipe: Recipe,
) -> None:
    """Without a step each call draws its own bits and enters its amax: recomputing must repeat the
    call.
    """
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = llama(recompute=True)
        if compile_it:
            for block in model.blocks:  # type: ignore[union-attr]
                block.compile(backend="aot_eager")
        torch.manual_seed(1)
        found = [step(model, model, recipe, *tokens(), at=None, policy=POLICY) for _ in range(2)]
        scaling = [m.scaling_state() for m in model.modules() if isinstance(m, f4.nn.Linear)]
        results.append((found, scaling))
    (eager, eager_scaling), (compiled, compiled_scaling) = results
    assert all(same(a, b) for a, b in zip(eager, compiled, strict=True))
    assert all(
        same((*a.values(),), (*b.values(),))
        for a, b in zip(eager_scaling, compiled_scaling, strict=True)
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_without_the_context_is_refused_as_in_eager_mode(reentrant: bool) -> None:
    model = f4.convert(pair())
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(8, 16, requires_grad=True)
    with autocast(NVFP4(), step=0):
        y = torch_checkpoint(compiled, x, use_reentrant=reentrant)
    with pytest.raises(
        RuntimeError, match="is recomputed in backward without the autocast context"
    ):
        y.sum().backward()  # type: ignore[union-attr]


@pytest.mark.long
def test_one_context_serves_several_forward_and_backward_passes_of_a_recomputing_graph() -> None:
    model = f4.convert(pair())
    compiled = torch.compile(Checkpointed(model), backend="aot_eager")
    x = torch.ones(8, 16)
    with autocast(NVFP4(), step=0):
        for _ in range(2):
            with torch.no_grad():
                compiled(x)
            compiled(x).sum().backward()
