"""The programs of the GPU check: what they call equal, what they do with an error, how they are called."""

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

from fp4train.backends import Native, tensor_cores
from fp4train.nn import Linear
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed
from fp4train.quantize import Decoded, reference

NAN = torch.tensor([1.0, float("nan"), 1.0])
ONES = torch.ones(3)
FP8_SUM = gpu_sums.Case(first=gpu_sums.E4M3, second=gpu_sums.E4M3, fast=True, depth=512)


def test_each_command_of_a_first_visit_is_understood_and_ends_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong word in one of them would cost a step of the minutes on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Machine(monkeypatch).interprets_triton(False)
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


@pytest.mark.parametrize(
    ("name", "forms"),
    [("mxfp8 x", [True, False]), ("nvfp4 x", [True, False]), ("nvfp4 dy", [False])],
)
def test_values_of_both_forms_are_checked_where_x_and_dy_have_one_spec(
    monkeypatch: pytest.MonkeyPatch, name: str, forms: list[bool]
) -> None:
    """dy is emulated as values of both forms; of x the other form is codes."""
    asked: list[bool] = []

    class WrongColumns:
        """Forms of the reference, but values of columns are those of rows, transposed."""

        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def with_columns(
            self, column: Any, x: torch.Tensor, keys: Any, amaxes: Any, codes: Any
        ) -> tuple[Any, Any]:
            asked.append(codes[1])
            rows = reference.quantize_dequantize(x, self.spec, key=keys[0], amax=amaxes[0])
            if codes[1]:
                return rows, reference.quantize(x.T, column.spec, key=keys[1], amax=amaxes[1])
            return rows, Decoded(rows.values.T, rows.scale)

    monkeypatch.setattr(gpu_kernels.kernels, "TritonQuantizer", WrongColumns)
    cases = gpu_cases.launched_cases(((32, 64),))
    (case,) = [case for case in cases if case.name.startswith(f"{name}, both forms")]
    assert case.column is not None
    found = gpu_kernels.check_values(case, case.x, case.amax, case.column)
    assert asked == forms
    assert found.keys() - {"scale of columns"} == {"values of columns"}


# -- the profile -----------------------------------------------------------------------------------


def event(key: str, us: float, device: str = "CUDA", annotation: bool = False) -> Any:
    """An event of torch's profiler, as far as the profile reads it."""
    return SimpleNamespace(
        key=key,
        count=3,
        self_device_time_total=us,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        input_shapes=[],
    )


def test_ranges_that_programs_name_are_no_kernels() -> None:
    """Their time is the sum of kernels that are events, too: each would count twice."""
    kernels = [event("nvjet_hsh_256x128", 6000.0), event("adamw", 1000.0)]
    ranges = [
        event("Optimizer.step#AdamW.step", 1000.0, annotation=True),
        event("## Call CompiledFxGraph fx ##", 7000.0, annotation=True),
    ]
    operators = [event("aten::mm", 6000.0, device="CPU")]
    row = gpu_profile.profiled_row([*ranges, *kernels, *operators], operators, "CUDA")
    assert row["gpu ms"] == 7.0
    assert row["by kind"] == {"GEMM": 6.0, "optimizer": 1.0}
    assert row["launches"] == 6
    assert [name for name, *_ in row["kernels"]] == ["nvjet_hsh_256x128", "adamw"]
    assert [name for name, *_ in row["operators"]] == ["aten::mm"]


def test_a_profile_on_a_cpu_has_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 8)
    monkeypatch.setattr(gpu_profile, "timed", lambda run: x @ x.T)
    row = gpu_profile.profiled(SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    assert ("aten::mm", "[[4, 8], [8, 4]]", 1) in [row[:3] for row in row["operators"]]
    assert row["gpu ms"] > 0


def test_kernels_are_told_apart_by_their_names() -> None:
    kinds = {
        "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT": "GEMM",
        "scaled_product": "GEMM",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128": "attention",
        "quantize_both": "quantise",
        "amax_columns": "quantise",
        "decode_codes": "quantise",
        "product_factors": "quantise",
        "void transformer_engine::nvfp4::cast_transpose<...>": "quantise",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
        "void at::native::cunn_SoftMaxForward<4, float>": "loss",
        "void at::native::elementwise_kernel<128, 2, MulFunctor>": "elementwise, copies",
        "void at::native::vectorized_layer_norm_kernel<...>": "norm",
    }
    assert {name: gpu_profile.kind_of(name) for name in kinds} == kinds


def test_after_a_variant_that_fails_the_others_are_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a kernel may leave this process without its GPU."""
    alone: list[str] = []

    def row(measurer: object, variant: tuple[str, str, int]) -> dict[str, Any]:
        if variant[0] == "nvfp4":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {}

    monkeypatch.setattr(gpu_profile.Measurer, "row", row)
    monkeypatch.setattr(gpu_profile.subprocess, "run", lambda words: alone.append(words[-1]))
    monkeypatch.setattr(gpu_profile, "runs_here", lambda variant: True)
    monkeypatch.setattr(gpu_results, "needs_gpu", lambda options: None)
    gpu_profile.main(["--nine", "--out", str(tmp_path / "x.json")])
    names = [gpu_profile.label(variant) for variant in gpu_profile.NINE]
    at = names.index("nvfp4, emulated, 1 microbatch")
    assert alone == names[at + 1 :]


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


@pytest.mark.parametrize("place", range(3))
def test_a_nan_in_any_product_is_a_difference(place: int) -> None:
    products = [ONES, ONES, ONES]
    products[place] = NAN
    a, b, c = products
    good = (ONES, ONES, ONES)
    assert gpu_layers.compared(good, good, 0.0)["ok"]
    assert not gpu_layers.compared((a, b, c), good, 1e9)["ok"]
    zeros = (0 * ONES, 0 * ONES, 0 * ONES)
    assert gpu_layers.compared_errors([True] * 3, good, good, (2 * ONES, 2 * ONES, 2 * ONES))["ok"]
    assert not gpu_layers.compared_errors([True] * 3, (a, b, c), good, zeros)["ok"]


# -- sums and bandwidth ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"fast": False}, "the other accumulator"),
        ({"splits": 2}, "sums over 2 parts of K"),
        ({"unit": tensor_cores.BLACKWELL_FP8}, tensor_cores.BLACKWELL_FP8.name),
    ],
)
def test_a_gpu_that_sums_otherwise_is_shown_with_the_first_result_and_what_it_equals(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    def product(backend: object, a: Any, b: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
        words = {"unit": tensor_cores.HOPPER_FP8, "fast": True} | options
        return tensor_cores.product(a, b, words.pop("unit"), **words).to(out_dtype)

    monkeypatch.setattr(Native, "product", product)
    row = gpu_sums.compare(FP8_SUM, (9, 0), gpu_sums.TINY, "cpu")
    assert not row["ok"]
    assert 0 < row["differ"] <= row["of"] == gpu_sums.TINY**2
    assert row["first"]["measured"] != row["first"]["expected"]
    assert name in row["equal to"]


def test_the_sampled_rows_of_an_operand_are_those_of_the_whole() -> None:
    rows = torch.tensor([1, 5])
    for spec in (gpu_sums.E4M3, gpu_sums.MX_E4M3, gpu_sums.NVFP4):
        case = gpu_sums.Case(first=spec, second=spec, fast=False, depth=512)
        whole, _ = gpu_sums.operands(case, 8, "cpu")
        assert torch.equal(gpu_sums.rows_of(whole, rows).dequantize(), whole.dequantize()[rows])


@pytest.mark.parametrize("cuda", [(12, 6), (13, 0)])
def test_products_that_this_torch_is_too_old_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int]
) -> None:
    nvfp4 = gpu_sums.Case(first=gpu_sums.NVFP4, second=gpu_sums.NVFP4, fast=False, depth=512)
    monkeypatch.setattr(gpu_sums.native, "cuda_version", lambda: cuda)
    reason = "it needs CUDA 12.8, and this torch is built for 12.6" if cuda == (12, 6) else None
    assert gpu_sums.why_left_out(nvfp4) == reason
    assert gpu_sums.why_left_out(FP8_SUM) is None


@pytest.mark.parametrize("wrong", [None, "bias", "added", "turned"])
def test_a_library_that_multiplies_one_kind_of_integers_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    class Library:
        """Exact products in float64, but for the last one of a kind."""

        def __init__(self, way: str) -> None:
            self.way = way

        def why_triton(self, device: torch.device) -> None:
            return None

        def product(self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            sums = (a.values.double() @ b.values.double().T).float() * a.scale * b.scale
            kinds = {"bias": bias is not None, "turned": a.values.stride(0) == 1}
            sums = sums if bias is None else sums + bias.float()
            sums[-1, -1] += 64.0 * kinds.get(wrong or "", False)
            return sums.to(out_dtype)

        def add(self, total: torch.Tensor, a: Any, b: Any) -> None:
            total += self.product(a, b, out_dtype=torch.float32)
            total[-1, -1] += wrong == "added"

    monkeypatch.setattr(gpu_bandwidth, "ScaledProducts", Library)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    if wrong is None:
        assert gpu_bandwidth.scaled_row("cublas", x)["library"] == "cuBLAS"
    else:
        with pytest.raises(RuntimeError, match=f"1 of .* products differ: {wrong}"):
            gpu_bandwidth.scaled_row("cublas", x)


# -- runs ------------------------------------------------------------------------------------------


def test_two_runs_are_compared_step_by_step_and_a_nan_is_a_difference() -> None:
    steps = [{"step": n, "train/loss": 5.0 - n, "train/grad_norm": 1.0} for n in range(1, 6)]
    later = [*steps[:3], steps[3] | {"train/grad_norm": 2.0}, steps[4]]
    broken = [*steps[:2], steps[2] | {"train/loss": float("nan")}, *steps[3:]]
    assert gpu_training.first_difference(steps, steps) is None
    assert gpu_training.first_difference(steps, later) == 4
    assert gpu_training.first_difference(broken, broken) == 3
    assert gpu_training.first_difference(steps, steps[:4]) == -1
