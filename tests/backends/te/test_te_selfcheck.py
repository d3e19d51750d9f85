"""The GPU self-check's own logic; its comparison with TE's reference runs in test_te_real.py,
kernels only on a GPU.
"""

import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import gpu_parts
import pytest
import torch
from torch import nn

from fp4train.nn import Linear
from fp4train.precision import Context, Layer
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Delayed


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = pathlib.Path(__file__).parents[3] / "scripts" / "te_selfcheck.py"
    spec = importlib.util.spec_from_file_location("te_selfcheck", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["te_selfcheck"] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_fails(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 3
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_recipe_that_cannot_run_is_skipped_with_the_reason(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = script.Problem.draw(32, 32, 32, "cpu")
    (row,) = script.checked("native", script.check_native, "nvfp4", NVFP4(), problem)
    assert row.agrees is None
    assert "needs an NVIDIA GPU" in row.note


def test_nan_and_broken_checks_are_mismatches(script: ModuleType) -> None:
    good = torch.ones(4)
    bad = torch.tensor([1.0, 1.0, 1.0, float("nan")])
    assert script.compare("native", "x", (good,) * 3, (good,) * 3, 1e-6).agrees is True
    assert script.compare("native", "x", (good,) * 3, (good, good, bad), 1e-6).agrees is False

    def broken() -> list[object]:
        raise RuntimeError("CUDA Error: invalid argument\nmore")

    (row,) = script.guarded("native", "x", broken)
    assert row.agrees is False
    assert row.note == "RuntimeError: CUDA Error: invalid argument"


@pytest.mark.parametrize(
    "recipe", [NVFP4(), NVFP4(stochastic_rounding=False), MXFP8(), FP8Delayed(history=4)]
)
@pytest.mark.parametrize("wrong", [False, True])
def test_emulation_in_the_place_of_te_agrees_and_a_wrong_weight_does_not(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, recipe: object, wrong: bool
) -> None:
    """The second layer has another name, hence other random bits, as TE has."""

    def layers(problem: object, dtype: torch.dtype) -> tuple[Linear, Linear]:
        made = []
        for name in ("selfcheck", "te"):
            linear = nn.Linear(64, 96, bias=False, dtype=dtype)
            linear.weight.data.copy_(problem.w)  # type: ignore[attr-defined]
            if wrong and name == "te":
                linear.weight.data[:, :16] *= -1
            place = Layer(name=name, in_features=64, out_features=96, block=0, blocks=1)
            made.append(Linear.from_linear(linear, place, "emulate"))
        return made[0], made[1]

    monkeypatch.setattr(script, "layers", layers)
    monkeypatch.setattr(script.te_backend, "why_not", lambda *args, **sizes: None)
    row = script.check_native("name", recipe, script.Problem.draw(128, 64, 96, "cpu"))
    assert row.agrees is not wrong
    script.show([row], [{"name": "name", "te_ms": 1.0, "emulate_ms": 2.0, "bf16_ms": None}])


@pytest.mark.parametrize(("recipe", "entered"), [(NVFP4(), 0), (FP8Delayed(history=4), 1)])
def test_a_region_is_entered_for_delayed_recipes_only(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, recipe: object, entered: int
) -> None:
    """TE's autocast asserts that the GPU runs NVFP4's kernels, which the pure-torch reference does
    not need.
    """
    regions: list[object] = []

    @contextmanager
    def region(table: object) -> Iterator[None]:
        regions.append(table)
        yield

    monkeypatch.setattr(script.te_backend, "region", region)
    problem = script.Problem.draw(32, 64, 32, "cpu")
    layer, _ = script.layers(problem)
    layer.backend = "emulate"
    script.run_layer(layer, recipe, problem)
    assert regions == []
    layer.executor_in(Context(recipe=recipe), torch.device("cpu"))
    monkeypatch.setattr(layer, "backend", "te")
    script.run_layer(layer, recipe, problem)
    assert len(regions) == entered


def test_what_fails_while_it_is_timed_leaves_its_error_and_the_others_times(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def milliseconds(step: object) -> float:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 1.0

    monkeypatch.setattr(script, "milliseconds", milliseconds)
    monkeypatch.setattr(script, "why_not", lambda recipe, problem: None)
    times = list(script.measure(script.Problem.draw(32, 64, 32, "cpu")))
    assert len(times) == 1 + len(script.RECIPES)
    assert times[1]["te_ms"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert times[1]["emulate_ms"] == times[2]["te_ms"] == 1.0
    script.show([], times)


def test_a_dry_run_executes_every_part_and_says_what_each_asks_of_a_gpu(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "te.json"
    assert script.main(["--dry-run", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = json.loads(out.read_text())
    parts = re.findall(r"^\d\. (\w+)", said, flags=re.MULTILINE)
    ran = list(dict.fromkeys(row["part"] for row in found["rows"] if row["agrees"]))
    assert [*ran, *["time"] * (len(found["times"]) == 1 + len(script.DRY))] == parts
    (step,) = [each for each in gpu_parts.steps_of("te", out, None) if each.name == "te"]
    assert (
        re.findall(r"\((\w+)\)", step.asks) == parts
        and f"{len(script.RECIPES)} recipes" in step.asks
    )


def test_results_are_written_as_they_come(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A kernel that kills the process leaves what was found before it."""
    out = tmp_path / "selfcheck.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(script.availability, "pytorch_module", lambda: None)
    draw = script.Problem.draw
    monkeypatch.setattr(
        script.Problem, "draw", staticmethod(lambda *sizes: draw(32, 64, 32, "cpu"))
    )
    monkeypatch.setattr(
        script,
        "check_reference",
        lambda problem: [script.Row(part="reference", name="x", agrees=True)],
    )

    def check_native(name: str, recipe: object, problem: object) -> object:
        if name == "mxfp8":
            raise KeyboardInterrupt
        return script.Row(part="native", name=name, agrees=True)

    monkeypatch.setattr(script, "check_native", check_native)
    monkeypatch.setattr(script, "why_not", lambda recipe, problem: None)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--out", str(out), "--no-timing"])
    found = json.loads(out.read_text())
    assert found["machine"]["gpu"] == "a GPU"
    assert [row["name"] for row in found["rows"]] == [
        "x",
        *list(script.RECIPES)[: list(script.RECIPES).index("mxfp8")],
    ]
