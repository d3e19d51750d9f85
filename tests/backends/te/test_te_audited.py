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


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current"])
def test_a_clean_pass_on_te_has_no_fault_and_the_same_bits(report: Any, recipe: str) -> None:
    for name, layers in ((recipe, ("0", "2")), (f"te {recipe}", ("0", "1", "2"))):
        audit = report[name]
        assert audit["faults"] == [] and audit["uncovered"] == {} and audit["same"]
        assert audit["gemms"] == dict.fromkeys(layers, ALL)
        assert audit["partly"] == {layer: [] for layer in layers}


@pytest.mark.parametrize("fault", ["rounded_toward_zero", "larger"])
def test_a_random_code_that_is_no_neighbour_or_not_without_bias_is_found(
    report: Any, fault: str
) -> None:
    faults = report[fault]["faults"]
    assert any("none of the two neighbours" in text for text in faults), faults


def test_a_norm_within_a_module_of_te_hides_x_alone(report: Any) -> None:
    audit = report["te normed"]
    assert audit["faults"] == [] and audit["gemms"]["0"] == ALL
    hidden = [text.split(":")[0] for text in audit["partly"]["0"]]
    assert hidden == ["fprop, operand x", "wgrad, operand x"]


def test_delayed_scaling_of_te_is_said_to_be_uncovered(report: Any) -> None:
    assert set(report["te fp8_delayed"]["uncovered"]) == {"0", "1"}
