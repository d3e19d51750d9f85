"""Audits on TE's real Python (te_audited_on_cpu.py says what is faked): fp4train's layers on
backend te, and TE's own modules in other people's loops.
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 20):
    pytest.skip("needs the transformer_engine wheel, 2.20 or newer", allow_module_level=True)

pytestmark = pytest.mark.long

PROGRAM = pathlib.Path(__file__).with_name("te_audited_on_cpu.py")
ALL = ["fprop", "dgrad", "wgrad"]
RECIPES = (
    "nvfp4",
    "nvfp4, 1D weights",
    "nvfp4, four over six",
    "nvfp4, dequantised",
    "mxfp8",
    "mxfp8, 2D weights",
    "fp8_current",
    "fp8_block",
)


@pytest.mark.parametrize("layout", ["", ", in tiles"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_clean_pass_on_te_has_no_fault_and_the_same_bits(
    report: Any, recipe: str, layout: str
) -> None:
    """Padded tokens, two microbatches; in tiles with a bias, and dw added by the product."""
    told = report[recipe + layout]
    assert told["faults"] == [] and told["uncovered"] == {}
    assert told["gemms"] == {"0": ALL, "2": ALL}
    assert told["partly"] == {"0": [], "2": []}
    assert told["same"] and told["taken back"]


FAULTS = {
    "zeroed stochastic rounding": "quantised from zeros",
    "biased stochastic rounding": "scale is not that of the reference",
    "rounded to nearest": "rounding to nearest, planned stochastically",
    "rounded down": "none of the two neighbours",
    "beside the neighbours": "none of the two neighbours",
    "no transform": "hadamard=None",
    "doubled products": "the product is doubled",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_te_is_found(report: Any, fault: str) -> None:
    faults = report[fault]["faults"]
    assert any(FAULTS[fault] in text for text in faults), faults


@pytest.mark.parametrize(
    "recipe",
    ["te nvfp4", "te nvfp4 plain", "te mxfp8", "te fp8_current", "te fp8_block", "te bf16"],
)
def test_modules_of_te_are_audited_in_the_recipe_of_their_autocast(
    report: Any, recipe: str
) -> None:
    told = report[recipe]
    assert told["faults"] == [] and told["uncovered"] == {}
    assert told["gemms"] == {"0": ALL, "2": ALL, "3": ALL}
    assert told["same"] and told["taken back"]


def test_a_norm_within_a_module_of_te_hides_x_alone(report: Any) -> None:
    told = report["te normed"]
    assert told["faults"] == [] and told["gemms"]["0"] == ALL
    assert [text.split(":")[0] for text in told["partly"]["0"]] == [
        "fprop, operand x",
        "wgrad, operand x",
    ]
    assert "LayerNormLinear makes it of its input" in told["partly"]["0"][0]


def test_what_te_does_not_show_is_said(report: Any) -> None:
    reasons = report["te fp8_delayed"]["uncovered"]
    assert set(reasons) == {"0", "2"}
    assert "DelayedScaling has no counterpart" in reasons["0"]


def test_a_module_that_keeps_the_options_of_an_earlier_recipe_is_found(report: Any) -> None:
    """TE matches the class of a recipe alone: the transform stays off."""
    faults = report["te switched off"]["faults"]
    named = "hadamard=None"
    assert any("wgrad, operand x" in text and named in text for text in faults), faults
