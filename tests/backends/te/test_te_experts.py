"""Experts on TE's real GroupedLinear (te_experts_on_cpu.py says what is faked), and what it is
refused for.
"""

import pathlib
from dataclasses import replace
from typing import Any

import pytest

from fp4train.backends import choose
from fp4train.backends.te import availability, translate
from fp4train.hardware import Device, find_gpu
from fp4train.precision import Layer, Recipe
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed, Mixed

if (availability.version() or ()) < (2, 20):
    pytest.skip("needs the transformer_engine wheel, 2.20 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_experts_on_cpu.py")
EXPERTS = Layer(name="mlp.up", in_features=256, out_features=256, block=0, blocks=1, experts=4)
B200 = Device.elsewhere(find_gpu("B200"))
BF16 = 2.0**-8
SPLITS = {"nvfp4": [128, 0, 256, 128], "mxfp8": [32, 0, 160, 64], "fp8_current": [16, 0, 144, 48]}


@pytest.mark.parametrize("recipe", SPLITS)
def test_outputs_and_gradients_are_those_of_each_expert(report: Any, recipe: str) -> None:
    """With an expert without tokens, odd counts, rows after them, biases; dw of microbatches is
    summed in float32.
    """
    found = report[recipe]
    y, dx, dw, dbias = found["distances"]
    assert max(y, dx, dbias) < BF16 and dw < 1e-6 and not found["tail"]
    assert found["splits"] == SPLITS[recipe], "whole tiles, as get_align_size_for_quantization says"
    assert found["quantisers"], "each expert has an amax of its own"
    assert found["written"] == ["torch.float32"]


def test_without_a_sum_the_gradient_is_in_the_recipes_dtype_and_transposed_weights_are_the_same(
    report: Any,
) -> None:
    assert report["not summed"]["written"] == ["torch.bfloat16"]
    assert max(report["not summed"]["distances"]) < BF16
    assert report["transposed"]["distances"] == pytest.approx(
        report["mxfp8"]["distances"], abs=1e-9
    )


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (FP8Delayed(), "the histories of delayed scaling are those of a layer with one weight"),
        (
            NVFP4().with_high_precision("fprop"),
            "takes TE's own recipes: one format in all three GEMMs",
        ),
        (
            Mixed(fprop=NVFP4(row_scaled_activation=True), dgrad=NVFP4(), wgrad=NVFP4()),
            "TE's GroupedLinear takes one global scale per expert",
        ),
    ],
    ids=["delayed", "high", "rows"],
)
def test_what_the_grouped_layer_does_not_take_is_refused_with_its_reason(
    recipe: Recipe, said: str
) -> None:
    with pytest.raises(
        ValueError, match=f"backend=te cannot run .* in mlp.up .* on B200: .*{said}"
    ):
        choose(recipe.table(), EXPERTS, "te", B200)
    assert choose(recipe.table(), replace(EXPERTS, experts=0), "te", B200)["wgrad"].backend == "te"


def test_an_older_te_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "NEWEST", (2, 19))
    with pytest.raises(ValueError, match=r"experts need TE 2\.20"):
        choose(MXFP8().table(), EXPERTS, "te", B200)


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Current()], ids=lambda recipe: recipe.name)
def test_te_runs_experts_where_it_is_asked_to_and_auto_leaves_them_to_torch(recipe: Recipe) -> None:
    table = recipe.table()
    asked = choose(table, EXPERTS, "te", B200)
    assert {choice.backend for choice in asked.values()} == {"te"} and not any(
        c.grouped for c in asked.values()
    )
    assert {choice.backend for choice in choose(table, EXPERTS, "auto", B200).values()} == {
        "native"
    }
