"""The programs of the GPU check: what they call equal, what they do with an error, how they are called."""

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_bandwidth
import gpu_cases
import gpu_check
import gpu_kernels
import gpu_layers
import gpu_profile
import gpu_results
import gpu_sums
import gpu_training
import pytest
import torch
from pretended import Machine

import fp4train
from fp4train.backends import Native, tensor_cores
from fp4train.nn import Linear
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed

FP8_SUM = gpu_sums.Case(first=gpu_sums.E4M3, second=gpu_sums.E4M3, fast=True, depth=512)


def test_each_command_of_a_first_visit_is_understood_and_ends_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong word in one of them would cost a step of the minutes on a machine with a GPU."""
    machine = Machine(monkeypatch)
    machine.has_torch_for(None, is_available=lambda: False)
    machine.interprets_triton(False)
    for step in gpu_check.steps_of("nine", tmp_path / "x", None):
        for program in (step, *step.beside):
            monkeypatch.setattr(sys, "argv", list(program.words))
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(gpu_check.SCRIPTS / program.words[0]), run_name="__main__")
            assert ended.value.code == gpu_check.LEFT_OUT, (program.name, capsys.readouterr())


def test_an_error_is_a_row_and_the_rows_after_it_are_measured(tmp_path: Path) -> None:
    results = gpu_results.Results(tmp_path / "x.json")

    def crash() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    assert not results.measure("crash", crash)
    assert results.measure("good", dict)
    assert results.rows[0]["note"] == "RuntimeError: CUDA error: an illegal memory access"
    assert results.rows[1] == {"name": "good", "ok": True}
    assert results.code == 1


def test_a_first_visit_checks_every_operand_as_the_recipes_quantise_it() -> None:
    cases = gpu_cases.launched_cases()
    assert len({case.name for case in cases}) == len(cases) < 100
    alone = {(case.spec, case.x.dtype) for case in cases if case.column is None}
    both = {(case.spec, case.column) for case in cases}
    for recipe in (NVFP4(), MXFP8(), FP8Current(), FP8Delayed()):
        fprop, dgrad, wgrad = (recipe.table()[gemm] for gemm in ("fprop", "dgrad", "wgrad"))
        for spec in (fprop.first, dgrad.first, wgrad.first, wgrad.second):
            assert (spec, torch.bfloat16) in alone
        for spec in (fprop.second, dgrad.second):
            assert (spec, torch.float32) in alone
        assert {(fprop.first, wgrad.second), (dgrad.first, wgrad.first)} <= both


def test_bits_and_dtypes_are_compared_and_any_nan_is_like_another() -> None:
    a = torch.tensor([0.0, float("nan"), 1.0])
    assert gpu_kernels.difference(a, a.clone()) is None
    assert gpu_kernels.difference(None, None) is None
    assert gpu_kernels.difference(a, None) == "one is missing"
    zero = torch.tensor([-0.0, float("nan"), 1.0])
    assert gpu_kernels.difference(a, zero) == "1 of 3 differ, first at [0]: 0.0, not -0.0"
    number = torch.tensor([0.0, 2.0, 1.0])
    assert gpu_kernels.difference(a, number) == "1 of 3 differ, first at [1]: nan, not 2.0"
    assert "bfloat16" in str(gpu_kernels.difference(a.bfloat16(), a))


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [NVFP4(), gpu_layers.NEAREST, MXFP8(), FP8Delayed(history=4)])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_layer_like_emulation_agrees_and_one_with_a_wrong_weight_does_not(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, wrong: bool
) -> None:
    """The layer in TE's place has another name, hence other random bits, as TE has."""

    def make(problem: gpu_layers.Problem, backend: str) -> Linear:
        layer = gpu_layers.linear(problem, "emulate")
        if backend == "emulate":
            return layer
        if wrong:
            with torch.no_grad():
                layer.weight[:, :16] *= -1
        return Linear.from_linear(layer, replace(layer.layer, name="te"), "emulate")

    monkeypatch.setattr(gpu_layers.te_backend, "region", None)
    problem = gpu_layers.Problem.draw(256, 512, 384, "cpu")
    row = gpu_layers.compare(make, recipe, "te", problem, None)
    assert row["ok"] is not wrong


def test_a_recipe_that_a_backend_does_not_run_is_left_out_with_the_reason() -> None:
    problem = gpu_layers.Problem.draw(32, 64, 32, "cpu")
    row = gpu_layers.compare(gpu_layers.linear, NVFP4(), "native", problem, None)
    assert "on NVIDIA GPUs only, not on cpu" in row["left out"]
    assert gpu_layers.compare(gpu_layers.linear, FP8Current(), "native", problem, None)["ok"]


# -- sums and bandwidth ----------------------------------------------------------------------------


def test_a_gpu_that_sums_otherwise_is_shown_with_what_it_equals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def product(backend: object, a: Any, b: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
        return tensor_cores.product(a, b, tensor_cores.HOPPER_FP8, fast=False).to(out_dtype)

    monkeypatch.setattr(Native, "product", product)
    row = gpu_sums.compare(FP8_SUM, (9, 0), gpu_sums.TINY, "cpu")
    assert not row["ok"] and row["differ"] > 0
    assert "the other accumulator" in row["equal to"]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_library_that_multiplies_integers_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    class Library:
        """Exact products in float64, but for the last one with a bias."""

        def __init__(self, way: str) -> None:
            self.way = way

        def why_triton(self, device: torch.device) -> None:
            return None

        def product(self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            sums = (a.values.double() @ b.values.double().T).float() * a.scale * b.scale
            if bias is not None:
                sums = sums + bias.float()
                sums[-1, -1] += 64.0 * wrong
            return sums.to(out_dtype)

        def add(self, total: torch.Tensor, a: Any, b: Any) -> None:
            total += self.product(a, b, out_dtype=torch.float32)

    monkeypatch.setattr(gpu_bandwidth, "ScaledProducts", Library)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    if wrong:
        with pytest.raises(RuntimeError, match=r"1 of .* products differ: bias"):
            gpu_bandwidth.scaled_row("cublas", x)
    else:
        assert gpu_bandwidth.scaled_row("cublas", x)["library"] == "cuBLAS"


# -- runs ------------------------------------------------------------------------------------------


def test_two_runs_are_compared_step_by_step_and_a_nan_is_a_difference() -> None:
    steps = [{"step": n, "train/loss": 5.0 - n, "train/grad_norm": 1.0} for n in range(1, 6)]
    later = [*steps[:3], steps[3] | {"train/grad_norm": 2.0}, steps[4]]
    broken = [*steps[:2], steps[2] | {"train/loss": float("nan")}, *steps[3:]]
    assert gpu_training.first_difference(steps, steps) is None
    assert gpu_training.first_difference(steps, later) == 4
    assert gpu_training.first_difference(broken, broken) == 3
    assert gpu_training.first_difference(steps, steps[:4]) == -1


def test_kernels_are_counted_once_and_each_by_its_kind() -> None:
    """A range that a program names holds the time of kernels which are events, too."""

    def event(key: str, us: float, **others: Any) -> SimpleNamespace:
        on_gpu = SimpleNamespace(name="CUDA")
        range_of = {"is_user_annotation": False, "device_type": on_gpu} | others
        return SimpleNamespace(key=key, count=2, self_device_time_total=us, **range_of)

    events = [
        event("quantize_turned", 3000),
        event("nvjet_sm90", 5000),
        event("Optimizer.step#AdamW.step", 9000, is_user_annotation=True),
        event("## Call CompiledFxGraph f ##", 9000, is_user_annotation=True),
        event("aten::mm", 0, device_type=SimpleNamespace(name="CPU")),
    ]
    row = gpu_profile.profiled_row(events, [], "CUDA")
    assert row["gpu ms"] == 8 and row["launches"] == 4
    assert row["by kind"] == {"GEMM": 5, "quantise": 3}
    assert [name for name, *_ in row["kernels"]] == ["nvjet_sm90", "quantize_turned"]


def test_every_kernel_of_ours_has_a_kind() -> None:
    package = Path(fp4train.__file__).parent
    texts = (path.read_text("utf-8") for path in package.rglob("*.py"))
    launched = {name for text in texts for name in re.findall(r"\bLaunch\(\s*(\w+),", text)}
    assert {"quantize_both", "amax_columns", "scaled_product", "adamw"} <= launched
    for kernel in launched:
        assert gpu_profile.kind_of(kernel) in ("quantise", "GEMM", "optimizer"), kernel


def test_a_row_tells_the_clock_and_the_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_results.clock() == {}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 1755, 690.12\n")
    tool.chmod(0o755)
    assert gpu_results.clock() == {"SM MHz": 1755, "W": 690.12}
    tool.write_text("#!/bin/sh\necho '[N/A], [N/A]'\n")
    assert gpu_results.clock() == {}


def test_figures_computed_later_follow_from_the_rows_of_the_visit() -> None:
    path = Path(__file__).parents[2] / "benchmarks/h200.json"
    visit = json.loads(path.read_text("utf-8"))
    later = visit["computed later"]
    for row, corrected in zip(visit["profile"], later["profile"], strict=True):
        ranges = [
            ms for name, _, ms, _ in row["kernels"] if name.startswith(("Optimizer.", "## Call"))
        ]
        assert corrected["gpu ms"] == round(row["gpu ms"] - sum(ranges), 1), row["name"]
        assert sum(corrected["by kind"].values()) == pytest.approx(corrected["gpu ms"], abs=0.3)
    shares = {row["name"]: row["of copy"] for row in later["bandwidth"]}
    for row in visit["bandwidth"]:
        assert "bytes" not in row or shares[row["name"]] == round(row["GB/s"] / 4200, 2)
    page = path.with_suffix(".md").read_text("utf-8")
    assert all(f"{row['gpu ms']} ms" in page for row in later["profile"])
    assert all(f"| {share:.2f} |" in page for share in shares.values())
