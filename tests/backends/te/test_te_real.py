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


def test_tes_linear_on_tes_reference_equals_emulation_to_the_bit(report: Any) -> None:
    """y, dx, dw of te.Linear with the pure-torch NVFP4 reference, in BF16; one layer switches
    through the recipes.
    """
    for switches, equal in report["against_emulation"].items():
        assert equal == [True] * 3, switches


def test_the_selfchecks_reference_part_agrees_in_float32(report: Any) -> None:
    assert report["selfcheck"] <= 1e-6


def test_our_factory_builds_what_tes_own_recipes_build(report: Any) -> None:
    assert len(report["same_as_native"]) == 6
    assert all(report["same_as_native"].values()), report["same_as_native"]


def test_te_ignores_a_changed_option(report: Any) -> None:
    """The reason for one TE module a recipe. Once the second turns False, TE has learnt it (its
    issue 3157).
    """
    assert report["switching"] == [True, True]


def test_default_nvfp4(report: Any) -> None:
    built = report["quantizers"]["nvfp4"]
    flags = ("with_rht", "with_2d_quantization", "stochastic_rounding")
    assert {slot: [q[flag] for flag in flags] for slot, q in built.items()} == {
        "input": [True, False, False],
        "weight": [False, True, False],
        "grad_output": [True, False, True],
    }


@pytest.mark.parametrize(
    ("recipe", "slots", "high", "low"),
    [
        ("nvfp4_fprop_bf16", ("input", "weight"), "row", "column"),
        ("nvfp4_wgrad_bf16", ("input", "grad_output"), "column", "row"),
    ],
)
def test_a_gemm_in_bf16_has_an_identity_in_the_form_that_it_multiplies(
    report: Any, recipe: str, slots: tuple[str, str], high: str, low: str
) -> None:
    for slot, quantizer in report["quantizers"][recipe].items():
        if slot in slots:
            assert quantizer["kind"] == "HybridQuantizer" and quantizer["source"] == "original"
            assert quantizer[high] == {"kind": "IdentityQuantizer"}
            quantizer = quantizer[low]
        plain = report["quantizers"]["nvfp4"][slot]
        # the transform is one of wgrad
        with_rht = plain["with_rht"] and recipe == "nvfp4_fprop_bf16"
        kept = {"with_rht": quantizer["with_rht"], "with_post_rht_amax": with_rht}
        assert quantizer | kept == plain | kept
        assert quantizer["with_rht"] == with_rht


def test_formats_differ_between_forward_and_backward(report: Any) -> None:
    built = report["quantizers"]["nvfp4_forward_mxfp8_backward"]
    kinds = [built["input"][form]["kind"] for form in ("row", "column")]
    assert kinds == ["NVFP4Quantizer", "MXFP8Quantizer"]
    assert built["grad_output"]["kind"] == "MXFP8Quantizer"


def test_row_scaled_activations_keep_the_transform_for_wgrad(report: Any) -> None:
    built = report["quantizers"]["nvfp4_row_scaled"]["input"]
    assert built["row"]["row_scaled_nvfp4"]
    assert not built["column"]["row_scaled_nvfp4"]
    assert built["column"]["with_rht"]


def test_fp8_options(report: Any) -> None:
    built = report["quantizers"]
    assert built["mxfp8_hybrid_2d"]["grad_output"]["dtype"] == "kFloat8E5M2"
    assert built["mxfp8_hybrid_2d"]["weight"]["with_2d_quantization"]
    assert all(q["force_pow_2_scales"] for q in built["fp8_current_pow2"].values())
    assert not any(q["force_pow_2_scales"] for q in built["fp8_block_fp32"].values())
