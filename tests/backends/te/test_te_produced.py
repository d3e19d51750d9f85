"""Norms and gates that quantise their results for layers on Transformer Engine
(te_produced_on_cpu.py says what is faked), beside the same models without; and why others write
BF16.
"""

import pathlib
from typing import Any

import pytest

from fp4train.backends.te import TESources, availability
from fp4train.backends.te.given import CUDNN
from fp4train.precision import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, Recipe

pytest.importorskip("triton", reason="triton is not installed")
if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).with_name("te_produced_on_cpu.py")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
KERNELS = ("amax_produced", "quantize_produced", "norm_backward")
ALL = "attention_norm, mlp_norm, mlp of block 0"
RUNS = f"norms and gates are quantised where they are made ({ALL}), and not written in BF16"
ADDS = "; these norms also add what a layer returns to the residual stream."


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "amaxes", "launches", "fewer"),
    [
        ("plain", 8, 8, 10),
        ("summed", 8, 8, 10),
        ("recomputed", 14, 14, 16),
        ("mxfp8", None, 8, 10),
        ("mxfp8, recomputed", None, 14, 16),
    ],
)
def test_a_model_has_the_gradients_of_one_whose_norms_and_gates_te_reads(
    report: Any, case: str, amaxes: int | None, launches: int, fewer: int
) -> None:
    """In every bit: codes are those that TE makes of the BF16 tensors. The gradients of norms'
    weights are not rounded to BF16 here, whose half ulp is 2^-9. In each of two microbatches TE no
    longer quantises x of three groups of layers, nor dy of gate and of up; where blocks are
    recomputed, x twice.
    """
    found = report[case]
    assert [found["counts"].get(name) for name in KERNELS] == [amaxes, launches, 4]
    assert found["before"]["quantised"] - found["counts"]["quantised"] == fewer
    assert set(found["apart"]) == {"blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"}
    assert max(found["apart"].values()) < 2**-8
    assert found["said"] == [f"3 {RUNS}{ADDS}"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "launches", "fewer", "sums"),
    [("two blocks", 16, 20, 3), ("mxfp8, two blocks, recomputed", 28, 32, 2 + 2)],
)
def test_a_norm_makes_the_last_sum_of_the_block_before_for_layers_on_te(
    report: Any, case: str, launches: int, fewer: int, sums: int
) -> None:
    """In each of two microbatches, but for recomputed blocks, which keep it. Loss and gradients
    have the bits of sums by torch.
    """
    found = report[case]
    assert found["counts"]["sums"] == 2 * sums and report["plain"]["counts"]["sums"] == 2
    assert [found["counts"].get(name) for name in KERNELS[1:]] == [launches, 8]
    assert found["before"]["quantised"] - found["counts"]["quantised"] == fewer
    norms = {
        f"blocks.{block}.{name}.weight"
        for block in range(2)
        for name in ("attention_norm", "mlp_norm")
    }
    assert set(found["apart"]) == norms and max(found["apart"].values()) < 2**-8
    blocks = RUNS.replace("block 0", "blocks 0–1")
    assert found["said"] == [f"6 {blocks}{ADDS}"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "norms"),
    [("mxfp8, cudnn", 1), ("mxfp8, cudnn, summed", 1), ("mxfp8, cudnn, recomputed", 2)],
)
def test_tes_kernel_of_norms_runs_where_it_writes_codes_alone(
    report: Any, case: str, norms: int
) -> None:
    """Two norms in each of two microbatches, the gate in fp4train's kernels. Bits are equal, since
    the doubles of TE's kernels round as torch does.
    """
    counts = report[case]["counts"]
    expected = {"rmsnorm_fwd": 4 * norms, "rmsnorm_bwd": 4}
    assert {name: counts.get(name, 0) for name in expected} == expected
    assert counts["quantize_produced"] == 2 * (norms + 1)
    assert not report[case]["apart"]
    assert report[case]["said"] == [f"3 {RUNS}."]


@pytest.mark.long
def test_tokens_that_te_would_pad_are_left_to_it(report: Any) -> None:
    assert report["odd"]["counts"] == report["odd"]["before"] and not report["odd"]["apart"]
    padded = "Transformer Engine pads 62 tokens to a multiple of 32"
    assert report["odd"]["said"] == [f"3 norms and gates write BF16 ({ALL}): {padded}."]


@pytest.mark.long
def test_random_bits_of_the_gradients_are_those_of_the_step(report: Any) -> None:
    assert report["random bits"]["again"] == 0 < report["random bits"]["of another step"]


@pytest.mark.parametrize(
    ("recipe", "given", "kernel"),
    [
        (NVFP4(), None, "writes BF16, then quantises (nvfp4)"),
        (NVFP4(hadamard=False, two_d_weights=False), None, "writes BF16, then quantises (nvfp4)"),
        (
            NVFP4().with_high_precision("wgrad"),
            "takes no codes",
            "writes BF16, then quantises (nvfp4)",
        ),
        (MXFP8(), None, None),
        (MXFP8().with_high_precision("dgrad"), "takes no codes", "takes no codes"),
        (MXFP8(backward="dequantised"), "values of fprop's codes", "values of fprop's codes"),
        (
            NVFP4(backward="dequantised"),
            "values of fprop's codes",
            "writes BF16, then quantises (nvfp4)",
        ),
        (FP8Current(), "in NVFP4 and MXFP8 only", "writes BF16, then quantises (fp8_current)"),
        (FP8Block(), "in NVFP4 and MXFP8 only", "writes BF16, then quantises (fp8_block)"),
        (FP8Delayed(), "in NVFP4 and MXFP8 only", "into the history of one layer"),
    ],
)
def test_codes_come_from_kernels_that_write_no_bf16_or_not_at_all(
    recipe: Recipe, given: str | None, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUDNN, "1")
    sources = TESources()
    table = recipe.table()
    for reason, found in (
        (given, sources.why_not_given(table)),
        (kernel, sources.why_no_norm(table)),
    ):
        assert found is None if reason is None else reason in str(found)
