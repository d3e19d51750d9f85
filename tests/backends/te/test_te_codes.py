"""A layer on TE's real Python with exact codes (te_codes_on_cpu.py says what is faked), beside the
emulation, and with a weight that is gathered as codes.
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
RECIPES = (
    "nvfp4",
    "nvfp4, 1D weights",
    "nvfp4, four over six",
    "nvfp4, fprop high",
    "nvfp4, dequantised",
    "nvfp4, then mxfp8",
    "mxfp8",
    "mxfp8, 2D weights",
    "fp8_current",
    "fp8_current, both layouts",
    "fp8_block",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_those_of_the_emulation(report: Any, recipe: str) -> None:
    """Of two microbatches, to the rounding of single elements to BF16."""
    assert report[recipe]["distance"] < 2**-11


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_of_shards_give_the_bits_of_a_whole_weight_and_nothing_of_them_is_kept(
    report: Any, recipe: str
) -> None:
    """TE quantises no weight, and keeps none, where it would keep what it made of a whole one."""
    seen = report[recipe]
    assert seen["equal"]
    assert (seen["kept"], seen["by te"]) == (0, 0)
    assert seen["whole"]["kept"] > 0 and seen["whole"]["by te"] > 0
    fprop = "torch.bfloat16" if recipe == "nvfp4, fprop high" else "codes"
    assert seen["asked"] == [fprop, fprop, "codes", "codes"]
