"""Experts on TE's real GroupedLinear (te_experts_on_cpu.py says what is faked), and what it is
refused for.
"""

import pathlib
from dataclasses import replace
from typing import Any

import pytest

from fp4train.backends.te import availability, translate
from fp4train.hardware import Device, find_gpu
from fp4train.precision import Layer, Recipe, resolve
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Delayed, Mixed

if (availability.version() or ()) < (2, 20):
    pytest.skip("needs the transformer_engine wheel, 2.20 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_experts_on_cpu.py")
EXPERTS = Layer(name="mlp.up", in_features=256, out_features=256, block=0, blocks=1, experts=4)
B200 = Device.elsewhere(find_gpu("B200"))
BF16 = 2.0**-8
SPLITS = {
    "nvfp4": [128, 0, 256, 128],
    "mxfp8": [32, 0, 160, 64],
    "mxfp8, transposed": [32, 0, 160, 64],
    "fp8_current": [16, 0, 144, 48],
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", SPLITS)
def test_outputs_and_gradients_are_those_of_each_expert(report: Any, recipe: str) -> None:
    """With an expert without tokens, odd counts, rows after them, biases; dw of microbatches is
    summed in float32.
    """
    results = report[recipe]
    assert max(results["y"], results["dx"], results["dbias"]) < BF16
    assert results["dw"] < 1e-6 and not results["tail"]
    assert results["splits"] == SPLITS[recipe], "whole tiles (get_align_size_for_quantization)"


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (FP8Delayed(), "histories of delayed scaling"),
        (NVFP4().with_high_precision("fprop"), "one format in all three GEMMs"),
        (
            Mixed(fprop=NVFP4(row_scaled_activation=True), dgrad=NVFP4(), wgrad=NVFP4()),
            "one global scale per expert",
        ),
    ],
    ids=["delayed", "high", "rows"],
)
def test_what_the_grouped_layer_does_not_take_is_refused_with_its_reason(
    recipe: Recipe, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"backend=te cannot run .* in mlp.up .*{reason}"):
        resolve(EXPERTS, recipe, None, "te", B200)
    assert resolve(replace(EXPERTS, experts=0), recipe, None, "te", B200).wgrad.backend == "te"


def test_an_older_te_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "NEWEST", (2, 19))
    with pytest.raises(ValueError, match=r"experts need TE 2\.20"):
        resolve(EXPERTS, MXFP8(), None, "te", B200)


def test_te_runs_experts_where_it_is_asked_to_and_auto_leaves_them_to_torch() -> None:
    for backend, runs in (("te", "te"), ("auto", "native")):
        plan = resolve(EXPERTS, MXFP8(), None, backend, B200)
        assert {plan.fprop.backend, plan.dgrad.backend, plan.wgrad.backend} == {runs}
