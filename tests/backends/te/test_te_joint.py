"""Layers that read one x as one layer on Transformer Engine's real Python (te_joint_on_cpu.py), beside the same layers
apart."""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_joint_on_cpu.py")
RECIPES = ["mxfp8", "fp8_block", "mxfp8, wgrad high"]


@pytest.mark.parametrize("passes", ["plain", "recomputed"])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_of_weights_are_those_of_the_layers_apart_in_every_bit(
    report: Any, recipe: str, sums: bool, passes: str
) -> None:
    """In the second of two steps of two microbatches, with another weight. dx is one sum, rounded once to BF16 where
    layers apart round three terms and two sums. Parameters keep their names and gradients."""
    found = report["steps"][f"{recipe}, {sums}, {passes}"]
    assert found["differ"] == ["x"] and found["dx"] < 2**-8
    assert found["together"] and found["names"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gemm_is_one_product_and_adds_dw_of_microbatches_in_float32(report: Any, recipe: str) -> None:
    """Of two microbatches, whose weight is quantised once as TE's recipes keep it."""
    found = report["steps"][f"{recipe}, True, plain"]
    assert (found["gemms"], found["float32"]) == ([18, 6], 2)
    assert found["weights"] == ([1, 1] if "high" not in recipe else [2, 2])
    assert report["steps"][f"{recipe}, False, plain"]["float32"] == 0


@pytest.mark.parametrize("passes", ["plain", "recomputed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gemm_of_all_layers_adds_the_bits_that_autograd_adds_also_where_it_is_recomputed(
    report: Any, recipe: str, passes: str
) -> None:
    """Of two microbatches autograd takes the first as the sum."""
    assert report["steps"][f"{recipe}, True, {passes}"]["added"] == [True, 1, 2]


@pytest.mark.parametrize("in_product", [True, False])
def test_passes_that_leave_gradients_as_they_are_add_nothing_to_them(report: Any, in_product: bool) -> None:
    """`torch.autograd.grad` returns what such a pass has, though a product would add dw of all layers to `.grad`."""
    assert report["left"][str(in_product)] == {
        "dw": [True, True, True],
        "one dw": True,
        "dx": True,
        "left": [1, 1, 1],
        "added to one": [1, 2, 1],
        "added to all": [2, 3, 2],
    }


def test_weights_that_lie_in_one_memory_are_saved_copied_and_joined_again_where_they_were_replaced(report: Any) -> None:
    assert report["memory"] == {
        "loaded": True,
        "copied": True,
        "replaced": [False, True, True],
        "evaluated": [True, True, True],
    }


def test_a_change_of_the_recipe_drops_the_codes_of_layers_apart_and_of_their_matrix(report: Any) -> None:
    assert report["phases"]["kept"] == [[128, 128, 256], [512]] * 2
