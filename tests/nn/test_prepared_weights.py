"""Prepared weights and codes: how often they are made, for how long a layer keeps them, and what
backward keeps.
"""

import copy
import weakref
from typing import Any

import pytest
import torch
from linear_layers import gradients, layer, rand, same
from prepared import prepared_forms, sharing
from torch import Tensor, nn

from fp4train.nn import PreparedWeights
from fp4train.precision import MXFP8, NVFP4, FP8Current, Recipe, autocast
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import FPROP_W


def test_passes_that_share_constant_weights_prepare_them_once_and_others_in_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms = prepared_forms(monkeypatch)
    module = layer()
    first, second = ConstantWeights(), ConstantWeights()
    for constant in (first, first, second):
        gradients(module, rand(8, 32), NVFP4(), constant=constant)
    assert [form.number for form in forms] == [FPROP_W] * 2, "16×16 blocks serve both directions"
    gradients(module, rand(8, 32), NVFP4(two_d_weights=False), constant=second)
    assert [form.number == FPROP_W for form in forms[2:]] == [True, False]
    for _ in range(2):
        gradients(module, rand(8, 32), NVFP4())
    assert len(forms) == 6, "the step alone is no reason to keep them"


def test_another_parameter_in_the_place_of_the_weight_is_noticed() -> None:
    module = layer()
    x = rand(8, 32)
    with autocast(NVFP4(), step=0), sharing(ConstantWeights()):
        for factor in (1.0, 2.0, 3.0):  # the next weight may get the memory of a freed one
            module.weight = nn.Parameter(rand(48, 32) * factor)
            assert torch.equal(module(x), copy.deepcopy(module)(x))
            other = {"weight": rand(48, 32, seed=1) * factor}
            assert not torch.equal(torch.func.functional_call(module, other, (x,)), module(x))


def test_a_weight_that_is_gathered_again_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 frees a weight's memory after the layer and fills other memory with the same values
    before backward.
    """
    forms = prepared_forms(monkeypatch)
    module = layer(bias=False)
    x = rand(8, 32)
    values = module.weight.detach().clone()
    with autocast(NVFP4(), step=0), sharing(ConstantWeights()):
        first = module(x)
        storage = module.weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(values.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(module.weight):
            module.weight.copy_(values)
        assert torch.equal(module(x), first)
    assert len(forms) == 1


def test_no_codes_are_left_after_backward_although_the_loss_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Tensor]] = []
    prepare = PreparedWeights._prepare

    def noted(self: PreparedWeights, *arguments: Any) -> Any:
        prepared = prepare(self, *arguments)
        made.append(weakref.ref(prepared.values))
        return prepared

    monkeypatch.setattr(PreparedWeights, "_prepare", noted)
    module = layer()
    with autocast(NVFP4(), step=0):
        loss = module(rand(8, 32).requires_grad_()).sum()
    assert [values() is None for values in made] == [False]
    loss.backward(retain_graph=True)
    loss.backward()
    assert [values() is None for values in made] == [True]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


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


def test_backward_twice_through_a_kept_graph_gives_the_same() -> None:
    module = layer()
    x = rand(8, 32).requires_grad_()
    with autocast(NVFP4()):
        y = module(x)
    found = [torch.autograd.grad(y.sum(), (x, module.weight), retain_graph=True) for _ in range(2)]
    assert same(*found)
