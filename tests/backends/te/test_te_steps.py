"""Steps on TE's real Python (te_products_on_cpu.py says what is faked): gradients over
microbatches, delayed scaling, and an input that several layers read.
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_steps_on_cpu.py")
K = 96
OPERANDS = {
    "nvfp4": ("NVFP4", "NVFP4", "NVFP4"),
    "nvfp4, fprop high": ("bfloat16", "NVFP4", "NVFP4"),
    "nvfp4, wgrad high": ("NVFP4", "NVFP4", "bfloat16"),
    "mxfp8": ("MXFP8", "MXFP8", "MXFP8"),
    "fp8_current": ("Float8CurrentScaling",) * 3,
    "fp8_block": ("Float8Block",) * 3,
    "fp8_delayed": ("Float8",) * 3,
}


@pytest.mark.parametrize("recipe", OPERANDS)
def test_gradients_are_summed_in_float32_and_what_is_not_quantised_is_bf16(
    report: Any, recipe: str
) -> None:
    """cuBLASLt has no product of float32 by BF16, which TE would ask for where nothing casts the
    weight.
    """
    fprop, dgrad, wgrad = OPERANDS[recipe]
    assert report["gradients"][recipe]["calls"] == [
        ["dgrad", dgrad, dgrad, "bfloat16"],
        ["fprop", fprop, fprop, "bfloat16"],
        ["wgrad", wgrad, wgrad, "float32"],
    ]
    assert report["gradients"][recipe]["distance"] < 1e-6


def test_gradients_added_by_the_gemm_are_those_that_autograd_adds(report: Any) -> None:
    assert report["ways"] == [True] * 3


def test_passes_that_te_cannot_run_name_what_to_do(report: Any) -> None:
    assert "in_product=False" in report["errors"]["dw"]
    assert "region(recipe.table())" in report["errors"]["no region"]


@pytest.mark.parametrize(("recipe", "tokens"), [("nvfp4", 32), ("fp8_block", 128)])
def test_tokens_are_padded_and_cut_back_and_a_replaced_weight_runs(
    report: Any, recipe: str, tokens: int
) -> None:
    edges = report["edges"][recipe]
    assert edges["distance"] < 2**-8
    del edges["distance"]
    shapes = [[2, 0, K], [K]]
    expected = {"tokens": tokens, "dtype": "torch.float32", "shapes": shapes, "replaced": True}
    assert edges == expected


def test_a_history_is_taken_over_to_its_newest_entries_and_copied(report: Any) -> None:
    histories = {"2": [0, 3]}
    for name in ("4", "2", "copy", "not run"):
        history = histories.get(name, [0, 1, 2, 3])
        assert report["loaded"][name] == {"history": history, "scale": [5, 5]}, name


def test_a_region_of_several_tables_is_one_of_delayed_scaling(report: Any) -> None:
    assert report["outermost"] == "DelayedScaling"


def test_delayed_histories_roll_once_per_step_and_are_those_of_emulation(report: Any) -> None:
    delayed = report["delayed"]
    assert delayed["te, 4"] == delayed["te, 1"] == delayed["emulate, 2"]
    assert len(set(delayed["te, 4"]["dy"])) > 1, "steps differ"
    for rows in (4, 1):
        assert sorted(delayed[f"updates, te, {rows}"]) == ["backward"] * 3 + ["forward"] * 3


def test_evaluation_enters_no_amax_into_delayed_histories(report: Any) -> None:
    assert report["delayed"]["evaluated"] == report["delayed"]["te, 1"]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current", "fp8_delayed"])
@pytest.mark.parametrize("passes", ["plain", "recomputed", "changed"])
def test_layers_that_read_one_input_share_its_codes_and_keep_their_bits(
    report: Any, recipe: str, passes: str
) -> None:
    """Queries, keys and values quantise x once, twice if it was changed in place, and the sum that
    the last layer reads is another tensor. Delayed scaling enters x into the history of each layer.
    """
    quantised = 4 if recipe == "fp8_delayed" else 3 if passes == "changed" else 2
    assert report["readers"][f"{recipe}, {passes}"] == [quantised, True]
