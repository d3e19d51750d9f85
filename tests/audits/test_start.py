"""Each distinct quantiser and layer of a plan is tried before the first step."""

from __future__ import annotations

from typing import Any

import audit_planting as planting
import pytest
import torch
from faulty_kernels import equals_reference, kernels_equal_reference
from torch import nn

import fp4train as f4
from fp4train.audits import start
from fp4train.audits.start import check_plan
from fp4train.nn import Experts
from fp4train.precision import MXFP8, NVFP4, FP8Delayed, LayerPolicy, Recipe
from fp4train.precision.recipes import FP16, FP32
from fp4train.quantize import Quantized, QuantSpec


@pytest.mark.parametrize(
    "recipe",
    [NVFP4(), MXFP8(), FP8Delayed(), FP16(), FP32()],
    ids=["nvfp4", "mxfp8", "fp8", "fp16", "fp32"],
)
def test_a_plan_that_this_machine_computes_has_no_fault(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(48, 1056), nn.Linear(1056, 48))
    before = torch.random.get_rng_state()
    plan = f4.plan(model, recipe, LayerPolicy(last=0))
    assert list(check_plan(plan)) == []
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_kernel_that_quantises_otherwise_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = f4.plan(nn.Sequential(nn.Linear(32, 32)), NVFP4(), LayerPolicy(last=0))
    kernels_equal_reference(monkeypatch, lambda spec, device: spec.random)
    faults = list(check_plan(plan))
    assert faults and all("otherwise than the reference" in fault.what for fault in faults)


def test_a_kernel_with_another_global_scale_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its codes and block scales are those of the reference."""
    plan = f4.plan(nn.Sequential(nn.Linear(32, 32)), NVFP4(), LayerPolicy(last=0))
    (spec, *_) = plan.at(0).layers["0"].specs
    assert equals_reference(spec, "cpu")
    quantizer = start.quantizer

    class Doubled:
        def __init__(self, of: Any) -> None:
            self._of = of

        def codes(self, *arguments: Any) -> Quantized:
            quantised: Quantized = self._of.codes(*arguments)
            assert quantised.amax is not None
            return quantised._replace(amax=2 * quantised.amax, factor=None)

    def planted(spec: QuantSpec, device: str, *which: Any) -> Any:
        right = quantizer(spec, device, *which)
        return right if which else Doubled(right)

    monkeypatch.setattr(start, "quantizer", planted)
    assert not equals_reference(spec, "cpu")


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Delayed()], ids=["nvfp4", "mxfp8", "fp8"])
def test_an_expert_that_this_machine_computes_has_no_fault(recipe: Recipe) -> None:
    plan = f4.plan(nn.Sequential(Experts(2, 48, 64)), recipe, LayerPolicy(last=0))
    assert list(check_plan(plan)) == []


@pytest.mark.parametrize("experts", [0, 2])
def test_a_layer_that_multiplies_otherwise_is_a_fault(experts: int) -> None:
    layer = Experts(experts, 32, 32) if experts else nn.Linear(32, 32)
    plan = f4.plan(nn.Sequential(layer), NVFP4(), LayerPolicy(last=0))
    change, words = planting.OPERAND_FAULTS["zeroed stochastic rounding"]
    with planting.planted_operand(change):
        faults = list(check_plan(plan))
    assert any(words in fault.cause for fault in faults)
