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
    for switches, distances in report["against_emulation"].items():
        assert distances == {"y": 0.0, "dx": 0.0, "dw": 0.0}, switches


def test_the_selfchecks_reference_part_agrees_in_float32(report: Any) -> None:
    assert max(report["selfcheck"].values()) <= 1e-6, report["selfcheck"]


def test_our_factory_builds_what_tes_own_recipes_build(report: Any) -> None:
    assert len(report["same_as_native"]) >= 7
    assert all(report["same_as_native"].values()), report["same_as_native"]


def test_te_ignores_a_changed_option_and_ours_does_not(report: Any) -> None:
    """The reason for one TE module a recipe. Once te_False turns False, TE has learnt it (its issue
    3157).
    """
    assert report["switching"] == {
        "te_True": True,
        "te_False": True,
        "fp4train_True": True,
        "fp4train_False": False,
    }


def test_default_nvfp4(report: Any) -> None:
    built = report["quantizers"]["nvfp4"]
    flags = ("with_rht", "with_2d_quantization", "stochastic_rounding")
    assert {slot: [q[flag] for flag in flags] for slot, q in built.items()} == {
        "input": [True, False, False],
        "weight": [False, True, False],
        "grad_output": [True, False, True],
    }


def test_forward_in_bf16_is_identity_row_wise_and_nvfp4_column_wise(report: Any) -> None:
    built = report["quantizers"]["nvfp4_fprop_bf16"]
    plain = report["quantizers"]["nvfp4"]
    for slot in ("input", "weight"):
        assert built[slot]["kind"] == "HybridQuantizer"
        assert built[slot]["source"] == "original"
        assert built[slot]["row"] == {"kind": "IdentityQuantizer"}
        assert built[slot]["column"] == plain[slot]
    assert built["grad_output"] == plain["grad_output"]


def test_wgrad_in_bf16_is_identity_column_wise(report: Any) -> None:
    built = report["quantizers"]["nvfp4_wgrad_bf16"]
    for slot in ("input", "grad_output"):
        assert built[slot]["column"] == {"kind": "IdentityQuantizer"}
        assert not built[slot]["row"]["with_rht"]
    assert built["grad_output"]["row"]["stochastic_rounding"]
    assert built["weight"] == report["quantizers"]["nvfp4"]["weight"]


def test_formats_differ_between_forward_and_backward(report: Any) -> None:
    built = report["quantizers"]["nvfp4_forward_mxfp8_backward"]
    assert [built["input"][form]["kind"] for form in ("row", "column")] == [
        "NVFP4Quantizer",
        "MXFP8Quantizer",
    ]
    assert built["weight"]["row"]["with_2d_quantization"]
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
