"""What TE's real Python asks of its extension (te_calls_on_cpu.py says how): dtypes of GEMMs,
updates of scales.
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_calls_on_cpu.py")
KINDS = {
    "nvfp4": "NVFP4",
    "mxfp8": "MXFP8",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8Block",
}
HIGH = {
    "": (),
    " fprop high": ("fprop",),
    " wgrad high": ("wgrad",),
    " forward only": ("dgrad", "wgrad"),
}
DTYPES = ["float32", "bfloat16"]


@pytest.mark.parametrize("bias", ["", ", bias"])
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("variant", HIGH)
@pytest.mark.parametrize("recipe", KINDS)
def test_what_is_not_quantised_is_multiplied_in_bf16_whatever_dtype_the_weights_have(
    report: Any, recipe: str, variant: str, weights: str, bias: str
) -> None:
    """cuBLASLt has no product of float32 by BF16, which TE would ask for where nothing casts the
    weight.
    """
    calls = report["calls"][f"{recipe}{variant}, {weights} weights{bias}"]
    wanted = []
    for gemm in ("fprop", "dgrad", "wgrad"):
        operand = "bfloat16" if gemm in HIGH[variant] else KINDS[recipe]
        wanted.append({"gemm": gemm, "a": operand, "b": operand, "d": "bfloat16"})
    assert calls == wanted


def test_delayed_scaling_updates_once_per_step_and_direction_however_many_layers_there_are(
    report: Any,
) -> None:
    assert report["delayed"]["updates"] == [{"forward": 1, "backward": 1}] * 3


def test_delayed_scaling_updates_once_per_step_where_the_first_layer_runs_another_recipe(
    report: Any,
) -> None:
    assert report["delayed"]["beside other recipes"] == {"forward": 1, "backward": 1}


def test_evaluation_enters_no_amax_into_delayed_histories(report: Any) -> None:
    assert min(report["delayed"]["entered in training"]) > 0, (
        "the kernels' amaxes do enter in training"
    )
    assert report["delayed"]["evaluation leaves the histories alone"]
    assert report["delayed"]["entered by evaluation alone"] == 0


def test_weights_are_quantised_once_while_they_are_constant(report: Any) -> None:
    """In two microbatches, an evaluation, two other microbatches, and one that shares nothing."""
    for recipe in ("mxfp8", "fp8_current"):
        assert report["microbatches"][recipe] == [1, 0, 1, 1, 0, 1], recipe
    assert report["microbatches"]["fp8_delayed"] == [1, 1, 1, 1, 1, 1], (
        "its scale may change between passes"
    )


@pytest.mark.parametrize("recipe", [*KINDS, "nvfp4 fprop high"])
def test_every_step_hands_over_the_same_numbers_so_that_one_can_be_recorded(
    report: Any, recipe: str
) -> None:
    """A CUDA graph repeats what was handed over by value; the first step allocates what later ones
    keep.
    """
    _, second, third = report["repeats"][recipe]
    assert len([call for call in second if call[0] == "gemm"]) == 2 * 2 * 3
    assert second == third
