"""A layer on TE's real Python whose weight is gathered as codes (te_codes_on_cpu.py says what is
faked).
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 19):
    # tests/house/test_skips.py fails in CI without 2.20
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

pytestmark = pytest.mark.long

PROGRAM = pathlib.Path(__file__).with_name("te_codes_on_cpu.py")
CODED = (
    "nvfp4",
    "nvfp4, 1D weights",
    "nvfp4, four over six",
    "nvfp4, wgrad high",
    "nvfp4, then mxfp8",
    "mxfp8",
    "mxfp8, 2D weights",
    "fp8_current",
    "fp8_current, both layouts",
    "fp8_block",
    "fp8_block, parts of blocks",
    "fp8_block, 1D weights",
)
DEQUANTISED = (
    "nvfp4, dequantised",
    "nvfp4, 1D weights, dequantised",
    "mxfp8, dequantised",
    "fp8_current, dequantised",
    "fp8_current, both layouts, dequantised",
    "fp8_block, dequantised",
)


@pytest.mark.parametrize("sums", ["", ", summed"])
@pytest.mark.parametrize("recipe", [*CODED, *DEQUANTISED, "nvfp4, fprop high"])
def test_codes_of_shards_give_the_bits_of_a_whole_weight_and_nothing_of_them_is_kept(
    report: Any, recipe: str, sums: str
) -> None:
    """Outputs, gradients and an evaluation, of two microbatches whose backward passes follow both.
    TE quantises no weight, and keeps none, where it would keep what it made of a whole one.
    """
    found = report[recipe + sums]
    assert found["equal"] == [True] * 6
    assert (found["kept"], found["by te"]) == (0, 0)
    assert found["whole"]["kept"] > 0 and found["whole"]["by te"] > 0


@pytest.mark.parametrize("recipe", DEQUANTISED)
def test_a_dequantised_backward_is_that_of_a_straight_through_estimator(
    report: Any, recipe: str
) -> None:
    """Of TE's own codes, and of those that shards sent; all bits of dx, and dw, which is a sum of
    two microbatches, to the rounding of its terms.
    """
    for seen in (report[recipe]["whole"], report[recipe]):
        assert seen["dx"] == [True, True]
        assert seen["dw"] < 2**-8


@pytest.mark.parametrize("recipe", [*CODED, *DEQUANTISED])
def test_each_pass_asks_for_the_codes_of_its_form_and_none_for_values(
    report: Any, recipe: str
) -> None:
    assert report[recipe]["asked"] == ["codes"] * 5, (
        "two passes, forward and backward, and an evaluation"
    )


def test_a_pass_in_high_precision_asks_for_values_in_its_dtype(report: Any) -> None:
    values = "torch.bfloat16"
    assert report["nvfp4, fprop high"]["asked"] == [values, values, "codes", "codes", values]


def test_the_self_check_compares_the_same_on_a_gpu(report: Any) -> None:
    rows = report["self check"]
    left_out = {name for name, row in rows.items() if "left out" in row}
    assert left_out == {"nvfp4", "fp8 delayed"}
    assert len(rows) == 9
    assert all(row["ok"] for name, row in rows.items() if name not in left_out)
