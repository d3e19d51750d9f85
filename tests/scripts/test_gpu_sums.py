"""scripts/gpu_sums.py: what it says of a GPU that sums as is known, and of one that does not."""

from pathlib import Path
from typing import Any

import gpu_sums
import pytest
import torch
from gpu_parts import nine_steps

from fp4train.backends import Native, tensor_cores

HOPPER = (9, 0)
SPLIT = gpu_sums.Case(first=gpu_sums.E4M3, second=gpu_sums.E4M3, fast=False, depth=512)


def test_known_sums_are_equal_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_sums.dry_run() == 0
    printed = capsys.readouterr().out
    for name in ("E5M2·E4M3, split accumulator", "MXFP8 E4M3·MXFP8 E4M3", "NVFP4·NVFP4"):
        assert f"{name}, K 512" in printed


def test_a_gpu_that_sums_otherwise_is_shown_with_the_first_result_and_what_it_equals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fast(backend: Native, first: Any, second: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
        return tensor_cores.product(first, second, tensor_cores.HOPPER_FP8, fast=True).to(out_dtype)

    monkeypatch.setattr(Native, "product", fast)
    row = gpu_sums.compare(SPLIT, HOPPER, gpu_sums.TINY, "cpu")
    assert not row["ok"] and 0 < row["differ"] <= row["of"] == gpu_sums.TINY**2
    assert row["first"]["measured"] != row["first"]["expected"]
    assert row["equal to"] == ["the other accumulator"]


def test_a_gpu_that_sums_as_another_one_does_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def newer(backend: Native, first: Any, second: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
        return tensor_cores.product(first, second, tensor_cores.BLACKWELL_FP8).to(out_dtype)

    monkeypatch.setattr(Native, "product", newer)
    row = gpu_sums.compare(SPLIT, HOPPER, gpu_sums.TINY, "cpu")
    assert tensor_cores.BLACKWELL_FP8.name in row["equal to"]


def test_sums_over_parts_of_k_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def parted(backend: Native, first: Any, second: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
        unit = tensor_cores.HOPPER_FP8
        return tensor_cores.product(first, second, unit, fast=backend.fast, splits=2).to(out_dtype)

    monkeypatch.setattr(Native, "product", parted)
    fast = gpu_sums.Case(first=gpu_sums.E4M3, second=gpu_sums.E4M3, fast=True, depth=512)
    assert (
        "sums over 2 parts of K" in gpu_sums.compare(fast, HOPPER, gpu_sums.TINY, "cpu")["equal to"]
    )


def test_the_first_nine_minutes_ask_for_equal_sums() -> None:
    assert "gpu_sums.py" in [step.words[0] for step in nine_steps(Path("x"))]


def test_the_sampled_rows_of_an_operand_are_those_of_the_whole() -> None:
    rows = torch.tensor([1, 5])
    for spec in (gpu_sums.E4M3, gpu_sums.MX_E4M3, gpu_sums.NVFP4):
        case = gpu_sums.Case(first=spec, second=spec, fast=False, depth=512)
        first, _ = gpu_sums.operands(case, 8, "cpu")
        assert torch.equal(gpu_sums.rows_of(first, rows).dequantize(), first.dequantize()[rows])


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_sums", "--out", "x.json"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_sums.main() == 3 and "torch sees no GPU" in capsys.readouterr().out


def test_products_that_this_torch_is_too_old_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvfp4 = gpu_sums.Case(first=gpu_sums.NVFP4, second=gpu_sums.NVFP4, fast=False, depth=512)
    monkeypatch.setattr(gpu_sums.native, "cuda_version", lambda: (12, 6))
    assert gpu_sums.why_left_out(nvfp4) == "it needs CUDA 12.8, and this torch is built for 12.6"
    assert gpu_sums.why_left_out(SPLIT) is None
    monkeypatch.setattr(gpu_sums.native, "cuda_version", lambda: (13, 0))
    assert gpu_sums.why_left_out(nvfp4) is None
