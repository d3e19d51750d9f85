"""The guard of the first step: planned layers that nobody calls are named; those that may rest are
no error.
"""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4train as f4
from fp4train.errors import UserError
from fp4train.nn import Linear
from fp4train.nn.called import check_called
from fp4train.precision import NVFP4, Context, LayerPolicy, use


class Mixer(nn.Module):
    """Multiplies `out_proj.weight` itself, as Mamba's fused kernel does, if `fused`."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.in_proj(x).relu()
        return F.linear(h, self.out_proj.weight) if self.fused else self.out_proj(h)


def checked(model: nn.Module, policy: LayerPolicy | None = None) -> None:
    """One pass of `model`, and the guard."""
    f4.convert(model)
    called_layers: dict[object, bool] = {}
    with use(Context(recipe=NVFP4(), policy=policy, counts="tokens", called_layers=called_layers)):
        for block in model.children():
            block(torch.randn(16, 32)).sum().backward()
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    called = {layer.layer.name for layer in called_layers if isinstance(layer, Linear)}
    check_called(
        f4.plan(model, NVFP4(), policy), layers, called, lambda layer: layer.weight.grad is not None
    )


def test_a_weight_that_other_code_multiplies_is_an_error_that_names_layer_and_fix() -> None:
    with pytest.raises(
        UserError, match=r"1\.out_proj: planned in NVFP4 .* policy\.keep=\[out_proj\]"
    ):
        checked(nn.ModuleList([Mixer(False), Mixer(True)]))


class Unplanned(Mixer):
    """Multiplies both of its weights itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.in_proj.weight).relu(), self.out_proj.weight)


def test_the_fix_names_each_kind_of_layer_that_other_code_multiplies() -> None:
    blocks = nn.ModuleList([Unplanned(True), Unplanned(True)])
    with pytest.raises(UserError, match=r"policy\.keep=\[in_proj,out_proj\]$"):
        checked(blocks)
    checked(blocks, LayerPolicy(last=0, keep=["in_proj", "out_proj"]))


def test_the_fix_that_the_error_names_works() -> None:
    checked(nn.ModuleList([Mixer(False), Mixer(True)]), LayerPolicy(last=0, keep=["out_proj"]))


def test_a_layer_that_rests_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    resting = nn.Sequential(nn.Identity(), nn.Linear(32, 32))
    resting.forward = lambda x: x.requires_grad_()  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "fp4train"):
        checked(nn.ModuleList([Mixer(False), resting]))
    assert "first step: 1.1. Experts" in caplog.text


def test_an_alias_of_a_layer_that_is_called_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([Mixer(False), Mixer(False)])
    model[0].spare = nn.Linear(32, 32, bias=False)
    model[0].spare.weight = model[1].out_proj.weight
    with caplog.at_level(logging.WARNING, "fp4train"):
        checked(model)
    assert not caplog.records


def test_frozen_layers_that_are_called_are_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([Mixer(False), Mixer(False)])
    model[0].in_proj.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "fp4train"):
        checked(model)
    assert not caplog.records
