"""TE's real Python code, run without its CUDA extension in a process of its own (te_on_cpu.py says
what is faked).
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_on_cpu.py")


@pytest.mark.long
def test_tes_linear_on_tes_reference_equals_emulation_to_the_bit(report: Any) -> None:
    """y, dx, dw of te.Linear with the pure-torch NVFP4 reference, in BF16; one layer switches
    through the recipes.
    """
    for switches, equal in report["against_emulation"].items():
        assert equal == [True] * 3, switches


@pytest.mark.long
def test_our_factory_builds_what_tes_own_recipes_build(report: Any) -> None:
    assert len(report["same_as_native"]) == 6
    assert all(report["same_as_native"].values()), report["same_as_native"]


@pytest.mark.long
def test_row_scaled_activations_keep_the_transform_for_wgrad(report: Any) -> None:
    built = report["row scaled"]
    assert built["row"]["row_scaled_nvfp4"]
    assert not built["column"]["row_scaled_nvfp4"]
    assert built["column"]["with_rht"]
