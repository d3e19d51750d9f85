"""Steps on TE's real Python (te_products_on_cpu.py says what is faked): delayed scaling and
gradients over microbatches, what lives between forward and backward, and what a change of the
recipe leaves.
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_steps_on_cpu.py")


@pytest.mark.parametrize("rows", ["4", "2", "1"])
def test_delayed_histories_roll_once_per_step_however_it_is_cut_into_microbatches(
    report: Any, rows: str
) -> None:
    assert report["delayed"][rows]["updates"] == [["backward", "forward"]] * 3


def test_delayed_scales_do_not_depend_on_microbatches_and_histories_are_those_of_emulation(
    report: Any,
) -> None:
    found = report["delayed"]
    assert found["4"]["scales"] == found["2"]["scales"] == found["1"]["scales"]
    assert (
        found["4"]["history"] == found["2"]["history"] == found["1"]["history"] == found["emulated"]
    )
    assert len(set(found["emulated"]["dy"])) > 1, "steps differ"


def test_stages_of_a_pipeline_join_their_amaxes_among_their_own_ranks_after_the_last_backward(
    report: Any,
) -> None:
    """Over all ranks, in the middle of a step, stages would wait for each other."""
    joined = ["joined over", "the ranks of a stage"]
    assert report["stages"] == [["a backward pass ends"]] * 2 + [joined] * 2


@pytest.mark.parametrize(
    "recipe", ["nvfp4", "mxfp8", "fp8_current", "fp8_delayed", "nvfp4, wgrad high"]
)
def test_the_gemm_adds_up_gradients_of_microbatches_in_float32(report: Any, recipe: str) -> None:
    found = report["gradients"][recipe]
    assert found["written"] == ["float32"] * 8, "two steps of four microbatches"
    assert max(found["distances"]) < 1e-6 and found["dtype"] == "torch.float32"


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_gradients_added_by_the_gemm_are_those_that_autograd_adds_also_where_layers_are_recomputed(
    report: Any, recipe: str
) -> None:
    """Each of two layers has a GEMM per microbatch, of four."""
    assert report["ways"][recipe] == {"added": [0, 8, 8], "equal": [True] * 3}


def test_passes_that_leave_gradients_as_they_are_add_nothing_to_them(report: Any) -> None:
    """What TE adds to comes from outside of autograd: a pass that is to return it is an error that
    names the switch.
    """
    error = report["left"].pop("error")
    assert report["left"] == {"dx": True, "dw": True, "then": True}
    assert "in_product=False" in error


def test_a_gradient_that_is_no_part_of_a_sum_is_rounded_as_elsewhere(report: Any) -> None:
    assert report["gradients"]["one microbatch"] == ["bfloat16"]


def test_backward_passes_in_any_order_and_of_a_view_of_the_parameter_add_up(report: Any) -> None:
    assert report["orders"] == {"last first": 0.0, "of a view": 0.0}


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_delayed"])
def test_of_a_gathered_weight_nothing_is_kept_and_the_bits_are_those_of_a_whole_one(
    report: Any, recipe: str
) -> None:
    found = report["gathered"][recipe]
    assert found == {
        "copies of the weight": 0,
        "codes of the weight between": 0,
        "equal": [True] * 3,
    }


def test_a_change_of_the_recipe_drops_the_codes_of_the_weights(report: Any) -> None:
    assert (report["phases"]["kept"], report["phases"]["modules"]) == ([2, 2, 2], 2)


def test_a_history_of_another_length_begins_with_the_newest_amaxes(report: Any) -> None:
    before, after = report["phases"]["amaxes"]
    assert before == after and min(before) > 0


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current"])
def test_layers_that_read_one_input_share_its_codes_and_keep_their_bits(
    report: Any, recipe: str
) -> None:
    """Queries, keys and values quantise x once, and the sum that the last layer reads is the second
    tensor. What is kept for backward has no row-wise form.
    """
    for passes in ("plain", "recomputed", "evaluated"):
        found = report["readers"][f"{recipe}, {passes}"]
        assert (found["quantised"], found["rows kept"], found["equal"]) == (2, 0, True), passes
        assert "; q, k, v share one quantised x" in found["why"]


def test_an_input_that_was_changed_in_place_is_quantised_again(report: Any) -> None:
    found = report["readers"]["mxfp8, changed"]
    assert found["quantised"] == 3 and found["equal"]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4, wgrad high"])
def test_an_input_whose_codes_belong_to_a_layer_is_quantised_by_each(
    report: Any, recipe: str
) -> None:
    """Delayed scaling enters x into the history of each layer; quantisers of a custom recipe make
    other tensors.
    """
    found = report["readers"][f"{recipe}, plain"]
    assert found["quantised"] == 4 and found["equal"] and "share" not in found["why"]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current"])
def test_a_layer_adds_few_python_calls_to_those_of_te(report: Any, recipe: str) -> None:
    """Calls, since times depend on who else uses a machine. A layer that waits for its host gains
    by no format.
    """
    found = report["calls"][recipe]
    assert 0 < found["fp4train"] <= 36 and found["fp4train"] < found["te"] / 3
