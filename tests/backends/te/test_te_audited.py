"""Audits on TE's real Python (te_audited_on_cpu.py says what is faked): fp4train's layers on
backend te.
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
    audit = report[recipe]
    assert audit["faults"] == [] and audit["uncovered"] == {} and audit["same"]
    assert audit["gemms"] == dict.fromkeys(("0", "2"), ALL)
    assert audit["partly"] == {"0": [], "2": []}


@pytest.mark.parametrize("fault", ["rounded_toward_zero", "larger"])
def test_a_random_code_that_is_no_neighbour_or_not_without_bias_is_found(
    report: Any, fault: str
) -> None:
    faults = report[fault]["faults"]
    assert any("none of the two neighbours" in text for text in faults), faults
