"""Norms and gates that quantise their results for layers on Transformer Engine (te_produced_on_cpu.py says what is
faked), beside the same models without; and why others write BF16."""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability, given
from fp4train.precision import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, Recipe

pytest.importorskip("triton", reason="triton is not installed")
if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_produced_on_cpu.py")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
KERNELS = ("amax_produced", "quantize_produced", "norm_backward")


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "launches", "quantised"), [("plain", 8, 12), ("summed", 8, 12), ("recomputed", 14, 14)]
)
def test_a_model_has_the_gradients_of_one_whose_norms_and_gates_te_reads(
    report: Any, case: str, launches: int, quantised: int
) -> None:
    """In every bit: codes are those that TE makes of the BF16 tensors. The gradients of norms' weights are not rounded
    to BF16 here, whose half ulp is 2^-9. TE then quantises x of wo, and dy of wq, wk, wv, wo and down."""
    found = report[case]
    assert [found["counts"].get(name) for name in KERNELS] == [launches, launches, 4]
    assert found["counts"]["x or dy"] == quantised < found["before"]["x or dy"]
    assert set(found["apart"]) == {"blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"}
    assert max(found["apart"].values()) < 2**-8


@pytest.mark.long
def test_tokens_that_te_would_pad_are_left_to_it(report: Any) -> None:
    assert report["odd"]["counts"] == report["odd"]["before"] and not report["odd"]["apart"]


@pytest.mark.long
def test_random_bits_of_the_gradients_are_those_of_the_step(report: Any) -> None:
    assert report["random bits"]["again"] == 0 < report["random bits"]["of another step"]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (NVFP4(), None),
        (NVFP4(hadamard=False, two_d_weights=False), None),
        (MXFP8(), "write MXFP8"),
        (FP8Current(), "write BF16 before they quantise it"),
        (FP8Block(), "write BF16 before they quantise it"),
        (FP8Delayed(), "into the history of one layer"),
        (NVFP4().with_high_precision("wgrad"), "takes no codes"),
    ],
)
def test_only_recipes_whose_codes_te_takes_are_given_some(recipe: Recipe, reason: str | None) -> None:
    found = given.why_not(recipe.table())
    assert found is None if reason is None else reason in str(found)
