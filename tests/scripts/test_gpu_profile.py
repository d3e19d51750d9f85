"""scripts/gpu_profile.py: what it makes of a step's kernels, and how it goes on after a failure."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import gpu_profile
import gpu_runs
import pytest
import torch
from torch.profiler import ProfilerActivity, profile


def test_kernels_are_told_apart_by_their_names() -> None:
    found = {
        "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT": "GEMM",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128": "attention",
        "quantize": "quantise",
        "scaled_product": "GEMM",
        "void transformer_engine::nvfp4::cast_transpose<...>": "quantise",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
        "void at::native::cunn_SoftMaxForward<4, float>": "loss",
        "void at::native::elementwise_kernel<128, 2, MulFunctor>": "elementwise, copies",
        "void at::native::vectorized_layer_norm_kernel<...>": "norm",
    }
    assert {name: gpu_profile.kind_of(name) for name in found} == found


def test_after_a_variant_that_fails_the_others_are_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of a kernel may leave this process without its GPU."""
    variants = [(recipe, mode, 1) for recipe, mode in gpu_profile.NINE]
    alone: list[str] = []

    def measure(run: object, name: str, *, dry: bool) -> dict[str, Any]:
        if name.startswith("nvfp4, emulated"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return {"name": name, "ok": True}

    def row_of(script: str, name: str) -> dict[str, Any]:
        alone.append(name)
        return {"name": name, "ok": True}

    monkeypatch.setattr(gpu_profile, "prepared", lambda words, dry: nullcontext())
    monkeypatch.setattr(gpu_profile, "swap", lambda *_: None)
    monkeypatch.setattr(gpu_profile, "measure", measure)
    monkeypatch.setattr(gpu_runs, "alone", row_of)
    rows = list(gpu_profile.nine_rows(list(variants), dry=False))
    assert [row["name"] for row in rows] == [gpu_profile.label(*variant) for variant in variants]
    assert [row["name"] for row in rows if not row["ok"]] == ["nvfp4, emulated, 1 microbatch"]
    assert alone == [row["name"] for row in rows[2:]]


def test_passes_that_apply_a_scale_are_found_among_the_operators_of_a_step() -> None:
    matrix = torch.ones(4, 8)
    scale = torch.tensor(2.0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        torch.mul(matrix.mul_(scale), scale, out=torch.empty(4, 8, dtype=torch.bfloat16))
        matrix * matrix
        matrix * torch.ones(8)
    events = found.key_averages(group_by_input_shape=True)
    kernels = [
        SimpleNamespace(key=name, count=10) for name in ("product_factors", "scaled_product")
    ]
    counted = [e.count for e in gpu_profile.of_factors(list(events), kernels)]
    assert sum(counted) == 2 + 10, [(e.key, e.input_shapes) for e in events]
