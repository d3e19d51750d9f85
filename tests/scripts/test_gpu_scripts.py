"""The scripts for GPU machines, as far as a CPU goes: what they would run, what they go on with, when they fail."""

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_cases
import gpu_launched
import pytest
import torch
from configured import points_of
from pretended import Machine
from recorded_products import Recorder

from fp4train.precision import BF16, MXFP8, NVFP4, FP8Current, FP8Delayed
from fp4train.quantize import Decoded, QuantSpec

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_cases_that_were_written_before_are_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("gpu_kernels")
    out = tmp_path / "k.json"
    chosen = script.all_cases("cpu", sanitize=False, full=False)[:4]
    checked: list[str] = []

    def one(case: object, device: str) -> dict[str, str]:
        checked.append(case.name)  # type: ignore[attr-defined]
        if len(checked) == 3:
            raise RuntimeError("ptxas fatal: out of memory\nmore")
        return {}

    monkeypatch.setattr(script, "check", one)
    monkeypatch.setattr(script, "all_cases", lambda *args, **options: chosen)
    Machine(monkeypatch).quantises_by_triton()
    monkeypatch.setattr(sys, "argv", ["gpu_kernels", "--out", str(out)])
    written = out.with_suffix(".cases.jsonl")
    written.write_text(
        json.dumps({"case": chosen[1].name, "differences": {}}) + '\n{"case": "cut o'
    )
    assert script.main() == 1
    assert checked == [chosen[0].name, chosen[2].name, chosen[3].name]
    result = json.loads(out.read_text())
    assert result["cases"] == 4
    assert result["different"] == [
        {
            "case": chosen[3].name,
            "differences": {"error": "RuntimeError: ptxas fatal: out of memory"},
        }
    ]


def test_a_tensor_keeps_its_strides_on_its_way_to_the_gpu() -> None:
    """A strided view that arrives without gaps would leave the kernels' strides unchecked there."""
    script = load("gpu_kernels")
    x = torch.zeros(6, 8)
    for each in (x, x.T, x[:, ::2], x.T[:, 1::2]):
        assert script.on(each, "meta").stride() == each.stride() and script.on(each, "cpu") is each


def test_values_of_both_forms_are_checked_where_x_and_dy_have_one_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dy of MXFP8 is emulated as values of both forms, and so is that of other recipes; of x
    the other form is codes, but of random specs, which are those of dy alone.
    """
    script = load("gpu_kernels")
    asked: list[bool] = []

    class WrongColumns:
        """Both forms of the reference; values of columns are those of rows, transposed."""

        def __init__(self, spec: QuantSpec) -> None:
            self.spec = spec

        def with_columns(self, column: Any, x: torch.Tensor, *arguments: Any) -> tuple[Any, Any]:
            row_key, row_amax, column_key, column_amax, _, column_codes = arguments
            asked.append(column_codes)
            rows = script.reference.quantize_dequantize(x, self.spec, key=row_key, amax=row_amax)
            if column_codes:
                return rows, script.reference.quantize(
                    x.T, column.spec, key=column_key, amax=column_amax
                )
            return rows, Decoded(rows.values.T, rows.scale)

    monkeypatch.setattr(script.kernels, "TritonQuantizer", WrongColumns)
    cases = [case for case in gpu_launched.launched_cases(((32, 64),)) if "both forms" in case.name]
    for recipe, forms in {
        "mxfp8 x": [True, False],
        "nvfp4 x": [True, False],
        "nvfp4 dy": [False],
    }.items():
        asked.clear()
        (case,) = [case for case in cases if case.name.startswith(f"{recipe},")]
        assert case.column is not None
        unlike = script.check_values(
            case, case.x, case.amax, case.column, gpu_cases.KEY.replace(operand=4)
        )
        assert asked == forms
        assert unlike.keys() - {"scale of columns"} == {"values of columns"}


def test_processes_share_all_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu_kernels")
    monkeypatch.setattr(script, "check", lambda case, device: {})
    Machine(monkeypatch).quantises_by_triton()
    written = tmp_path / "k.cases.jsonl"
    for index in range(3):
        monkeypatch.setattr(
            sys, "argv", ["gpu_kernels", "--out", str(written), "--share", f"{index}/3"]
        )
        assert script.main() == 0
    names = [json.loads(line)["case"] for line in written.read_text().splitlines()]
    assert sorted(names) == sorted(
        case.name for case in script.all_cases("cpu", sanitize=False, full=False)
    )
    assert len(set(names)) == len(names)


@pytest.mark.long
def test_fewer_cases_are_compiled_unless_all_are_asked_for() -> None:
    script = load("gpu_kernels")
    few, full = (script.all_cases("cuda", sanitize=False, full=full) for full in (False, True))
    assert len(few) * 3 == len(full)
    both = {f"{row}, and {column} of x.T" for row, column in gpu_cases.PAIRS}
    wanted = gpu_cases.SPECS.keys() | both
    assert {case.name.split(" | ")[0] for case in few} == wanted


def test_a_first_visit_checks_every_operand_as_the_recipes_quantise_it() -> None:
    cases = gpu_launched.launched_cases()
    assert len({case.name for case in cases}) == len(cases) < 100
    alone = {(case.spec, case.x.dtype) for case in cases if case.column is None}
    both = {(case.spec, case.column) for case in cases if case.column is not None}
    for recipe in (NVFP4(), MXFP8(), FP8Current(), FP8Delayed()):
        fprop, dgrad, wgrad = (recipe.table()[gemm] for gemm in ("fprop", "dgrad", "wgrad"))
        activations = {fprop.first, dgrad.first, wgrad.first, wgrad.second}
        weights = {fprop.second, dgrad.second}
        assert alone >= {(spec, torch.bfloat16) for spec in activations}
        assert alone >= {(spec, torch.float32) for spec in weights}
        assert both >= {(fprop.first, wgrad.second), (dgrad.first, wgrad.first)}


def test_native_products_need_a_gpu_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = load("gpu_native")
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 3
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "agrees"), [("fp8 current", True), ("nvfp4", None)])
def test_native_products_of_a_cpu_agree_and_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch, name: str, agrees: bool | None
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = load("gpu_native")
    problem = script.selfcheck.Problem.draw(32, 64, 32, "cpu")
    row = script.compare(name, script.RECIPES[name], problem, timed=False)
    assert row["agrees"] is agrees, row


def test_block_scaled_products_are_compared_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `scaled_mm` as a CPU can run it: what is left for the GPU is cuBLAS's answer."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = load("gpu_native")
    recorder = Recorder()
    Machine(monkeypatch).multiplies_blocks()
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", recorder)
    problem = script.selfcheck.Problem.draw(128, 256, 128, "cpu")
    names = [name for name in script.RECIPES if not name.startswith("fp8") or "blocks" in name]
    for name in names:
        recorder.calls.clear()
        row = script.compare(name, script.RECIPES[name], problem, timed=False)
        assert row["agrees"], row
        assert len(recorder.calls) == 6, "three GEMMs in each of two steps"
    assert len(names) >= 7


TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(SCRIPTS.rglob("*.py"))}
PROGRAMS = [
    p
    for p, text in TEXTS.items()
    if "__main__" in text and ("argparse" in text or "gpu_runs.options" in text)
]
"""Scripts with options, not modules of theirs."""


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.name)
def test_every_script_still_imports_what_it_uses(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a program, but in this process, which has imported torch already."""
    monkeypatch.setattr(
        sys, "path", [str(SCRIPTS), *(place for place in sys.path if "tests/helpers" not in place)]
    )
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_recorded_steps_are_compared_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("gpu_graph")
    for keys in script.CASES.values():
        assert points_of([*script.OPTIONS, *keys, "train.cuda_graph=true"])
    lines = [
        {
            "step": i,
            "train/loss": 5.0 - i,
            "train/grad_norm": 1.0,
            "train/tokens": 100 * i,
            "perf/tokens_per_s": 50.0 * i,
        }
        for i in range(1, 9)
    ]
    other = [*lines[:6], {**lines[6], "train/grad_norm": 2.0}, lines[7]]
    memory = "fp4train: out of memory"
    runs = {"same": (lines, lines), "other": (lines, other), "failed": (lines, memory)}
    monkeypatch.setattr(script, "CASES", dict.fromkeys(runs, ()))
    places = {"false": 0, "true": 1}
    monkeypatch.setattr(
        script, "train", lambda folder, name, keys, graph, *_, **__: runs[name][places[graph]]
    )
    same = script.compare(tmp_path, "same", [])
    times = {f"{graph} ms": 100000 / 350 for graph in places}
    assert same == {"name": "same", "ok": True, "first difference at step": {}, **times}
    assert script.compare(tmp_path, "other", [])["first difference at step"] == {"true": 7}
    failed = script.compare(tmp_path, "failed", [])
    assert failed["failed"] == {"true": memory} and not failed["ok"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_graph", "--out", str(tmp_path / "x.json")])
    assert script.main() == 3


def test_the_large_step_has_a_real_vocabulary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the 257 ids of bytes a quarter of a step, the head, would not be measured."""
    benchmark = load("benchmark")
    steps = load("benchmark_steps")
    asked: list[str] = []

    def measure(report: object, device: torch.device, overrides: list[str], name: str) -> None:
        asked.extend(overrides)
        tiny = ("model.width=32", "model.heads=2", "model.kv_heads=1", "model.hidden=32")
        smaller = (
            "model.layers=1",
            "train.batch_size=1",
            "train.steps=2",
            "eval.every=0",
            "optim.clip=1",
        )
        kept = [each for each in overrides if each.startswith("data")]
        with steps.built_run(torch.device("cpu"), [*kept, *tiny, *smaller, "train.seq_len=16"]) as (
            run,
            step,
        ):
            step(BF16())
            sizes.append(run.train_data.tokens.vocab_size)

    sizes: list[int] = []
    monkeypatch.setattr(benchmark, "bench_step", lambda *_: None)
    monkeypatch.setattr(benchmark, "bench_large_step", measure)
    benchmark.run_parts(benchmark.Report(), ["step"], torch.device("cuda"), quick=True)
    assert "model=llama_1b" in asked and sizes == [128_256]
