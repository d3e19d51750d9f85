"""Prepared weights and codes: how often they are made, for how long a layer keeps them, and what
backward keeps.
"""

import copy
import weakref

import pytest
import torch
from linear_layers import gradients, layer, rand, same
from prepared import prepared_forms
from torch import Tensor, nn

from fp4train.precision import MXFP8, NVFP4, FP8Current, Recipe, autocast
from fp4train.quantize import FPROP_W


def test_with_a_step_weights_are_prepared_once_and_anew_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms = prepared_forms(monkeypatch)
    module = layer()
    for step in (0, 0, 1):
        gradients(module, rand(8, 32), NVFP4(), step=step)
    assert [form.number for form in forms] == [FPROP_W] * 2, "16×16 blocks serve both directions"
    gradients(module, rand(8, 32), NVFP4(two_d_weights=False), step=1)
    assert [form.number == FPROP_W for form in forms[2:]] == [True, False]


@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizers_step_reaches_the_next_forward(fused: bool) -> None:
    """A fused optimizer changes weights without incrementing torch's version counter: only the step
    shows it.
    """
    for steps in ((0, 1), (None, None)):
        module = layer()
        x = rand(8, 32)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0) if not fused else None
        optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=1.0, fused=True)
        before = gradients(module, x, NVFP4(), step=steps[0])[0]
        optimizer.step()
        with autocast(NVFP4(), step=steps[1]):
            found = module(x)
        fresh = copy.deepcopy(module)
        with autocast(NVFP4(), step=steps[1]):
            assert torch.equal(found, fresh(x))
        assert not torch.equal(found, before)


def test_a_replaced_or_loaded_weight_is_noticed_within_a_step() -> None:
    module = layer()
    other = layer()
    x = rand(8, 32)
    with torch.no_grad():
        other.weight.mul_(-3)
    with autocast(NVFP4(), step=0):
        expected = other(x)
        module(x)
        module.load_state_dict(other.state_dict())
        assert torch.equal(module(x), expected)
        for factor in (1.0, 2.0, 3.0):  # the next weight may get the memory of a freed one
            module.weight = nn.Parameter(other.weight.detach() * factor)
            assert torch.equal(module(x), copy.deepcopy(module)(x))


def test_a_weight_that_is_gathered_again_within_a_step_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 frees a weight's memory after the layer and fills other memory with the same values
    before backward.
    """
    forms = prepared_forms(monkeypatch)
    module = layer(bias=False)
    x = rand(8, 32)
    values = module.weight.detach().clone()
    with autocast(NVFP4(), step=0):
        first = module(x)
        storage = module.weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(values.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(module.weight):
            module.weight.copy_(values)
        assert torch.equal(module(x), first)
    assert len(forms) == 1


def test_what_was_prepared_is_dropped_with_the_weight() -> None:
    module = layer(bias=False)
    with autocast(NVFP4(), step=0):
        module(rand(8, 32))
    (_, form), *_ = module.forms._forms
    values = weakref.ref(form.values)
    del form
    module.weight = nn.Parameter(torch.zeros(48, 32))
    assert values() is None


def test_without_a_step_nothing_is_kept_and_bits_change_from_call_to_call() -> None:
    module = layer(bias=False)
    x = rand(32, 32)
    first, second = (gradients(module, x, NVFP4(), step=None)[1] for _ in range(2))
    assert not torch.equal(first, second), "stochastic rounding draws anew"
    assert torch.equal(
        *(gradients(module, x, NVFP4(stochastic_rounding=False), step=None)[1] for _ in range(2))
    )
    with torch.no_grad(), autocast(NVFP4()):
        module(x)
    assert module._calls == 4, "evaluation does not advance the count"


@pytest.mark.parametrize(
    ("recipe", "per_element"),
    [(NVFP4(), 0.6), (MXFP8(), 1.05), (FP8Current(), 1.05)],
    ids=lambda r: str(r)[:6],
)
def test_backward_keeps_packed_codes(recipe: Recipe, per_element: float) -> None:
    module = layer(64, 48)
    x = rand(128, 64).bfloat16().requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(recipe, step=0):
        module(x)
    size = sum(t.untyped_storage().nbytes() for t in kept if t is not module.weight)
    assert size <= per_element * x.numel() + 4


def test_a_second_derivative_is_refused_instead_of_being_wrong() -> None:
    module = layer()
    x = rand(4, 32).requires_grad_()
    with autocast(NVFP4(), step=0):
        y = module(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_backward_twice_through_a_kept_graph_gives_the_same() -> None:
    module = layer()
    x = rand(8, 32).requires_grad_()
    with autocast(NVFP4()):
        y = module(x)
    found = [torch.autograd.grad(y.sum(), (x, module.weight), retain_graph=True) for _ in range(2)]
    assert same(*found)
