"""`fp4train doctor` as people run it: its screen, its JSON, its exit code on machines that lack
something.
"""

import json
import os
import shutil
from typing import Any

import pytest
import torch
from command_line import Cli
from pretended import Machine

from fp4train.audits import start
from fp4train.config import RECIPES
from fp4train.hardware import Device
from fp4train.lab.doctor import machine, recipes
from fp4train.precision import NVFP4, FP8Current
from fp4train.quantize import Quantizer, QuantSpec

EVERY = sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recipes, where what is tested is the machine."""
    monkeypatch.setattr(
        "fp4train.cli.doctor.own_recipes", lambda: {"nvfp4": NVFP4(), "fp8_current": FP8Current()}
    )


def test_every_recipe_is_tried_as_the_pages_table_shows_and_the_screen_fits(cli: Cli) -> None:
    """The page has some of the table's rows, in its order."""
    ended = cli.raw("doctor")
    assert ended.code == 0, ended.out
    lines = ended.out.splitlines()
    for name in EVERY:
        (row,) = [
            line for line in lines if line.split() and line.split()[0] == name and "  " in line
        ]
        assert "DIFFERENT" not in row
    assert max(map(len, lines)) <= 120 and len(lines) <= len(EVERY) + 30
    assert lines[-1] == "The default run will work: recipe=nvfp4 on cpu, emulated."
    assert list(cli.folder.iterdir()) == [], "it looks, and leaves nothing behind"

    def rows(text: str) -> list[tuple[str, ...]]:
        lines = text.partition("recipes on cpu\n")[2].partition("\n\n")[0].splitlines()
        cells = [[cell for cell in line.split("  ") if cell] for line in lines]
        return [tuple(cell.strip() for cell in row) for row in cells]

    page = (RECIPES.parent / "docs" / "doctor.md").read_text("utf-8")
    *shown, (*_, left_out) = rows(page)
    found = rows(ended.out)
    assert left_out == "…" and len(shown) > 8 and len(found) == len(EVERY) + 2
    assert shown == [row for row in found if row in shown]


@pytest.mark.usefixtures("few")
def test_json_holds_the_same(cli: Cli) -> None:
    ended = cli.raw("doctor", "--json")
    found: dict[str, Any] = json.loads(ended.out)
    assert ended.code == 0 and found["works"] and found["problems"] == []
    nvfp4, fp8 = found["recipes"]
    assert nvfp4["runs"] == "emulated" and nvfp4["codes"] and nvfp4["native_on"] == ["B200"]
    assert fp8["native_on"] == ["H100", "B200"] and fp8["codes"]


@pytest.mark.usefixtures("few")
def test_what_the_default_run_needs_and_lacks_is_said_and_the_code_is_1(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch).lacks_package("wandb")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    ended = cli.raw("doctor")
    assert ended.code == 1
    assert "packages: pip install wandb, or track=jsonl" in ended.out
    assert "disk: less than 2 GiB for checkpoints; set run.dir=FOLDER elsewhere" in ended.out
    assert "will work: recipe" not in ended.out


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("name", "code"), [("nvfp4", 1), ("fp8_current", 0)])
def test_a_kernel_that_quantises_otherwise_is_found_and_matters_where_the_default_run_uses_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    wrong = {"nvfp4": NVFP4(), "fp8_current": FP8Current()}[name].table().specs()[0]
    quantizer = recipes.quantizer

    class Wrong(Quantizer):
        kernel = "cpu"

        def codes(self, x_RC: torch.Tensor, key: Any = None, amax: Any = None) -> Any:
            return super().codes(-x_RC, key, amax)

    def chosen(spec: QuantSpec, device_type: str, kernel: str = "auto") -> Quantizer:
        return (
            Wrong(spec)
            if spec == wrong and kernel == "auto"
            else quantizer(spec, device_type, kernel)
        )

    for module in (recipes, start):
        monkeypatch.setattr(module, "quantizer", chosen)
    ended = cli.raw("doctor")
    assert ended.code == code
    (row,) = [line for line in ended.out.splitlines() if line.startswith(f"{name} ")]
    assert "DIFFERENT" in row
    assert f"recipe={name}: C quantise" in ended.out.replace("\n    ", " ")


@pytest.mark.parametrize(
    ("cuda", "raised", "words"),
    [
        (None, None, "this torch is built for CPUs"),
        (
            "13.0",
            RuntimeError("The NVIDIA driver on your system is too old (found version 12020)."),
            "is too old",
        ),
        ("13.0", None, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_driver_without_a_gpu_for_torch_is_explained(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, raised: Exception | None, words: str
) -> None:
    def init() -> None:
        if raised is not None:
            raise raised

    pretended = Machine(monkeypatch)
    pretended.has_driver("550.54.15")
    pretended.has_torch_for(cuda, is_available=lambda: False, init=init)
    part = machine._gpu()
    assert part.value == "torch sees none" and part.problem is None
    assert words in str(part.note)


@pytest.mark.parametrize(
    ("capability", "works"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_a_gpu_without_bf16_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], works: bool
) -> None:
    found = type(
        "Properties",
        (),
        {"name": "a GPU", "major": capability[0], "minor": capability[1], "total_memory": 1},
    )
    Machine(monkeypatch).has_torch_for(
        "13.0",
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: found,
        get_device_capability=lambda index: capability,
    )
    part = machine._gpu()
    assert part.value.startswith("2 × a GPU, compute capability ")
    assert (part.problem is None) is works
    assert works or "no BF16 products, which need 8.0; use device=cpu" in str(part.problem)


def test_other_words_than_json_are_refused(cli: Cli) -> None:
    ended = cli.raw("doctor", "recipe=nvfp4")
    assert ended.code == 1 and "doctor takes --json only" in ended.message


@pytest.mark.long
def test_recipes_tried_in_several_processes_are_the_same_and_a_crash_is_a_problem() -> None:
    """As on a GPU, where each compiles kernels."""
    here = Device.of("cpu")
    few = {"nvfp4": NVFP4(), "fp8_current": FP8Current()}
    assert recipes.check_all(few, here, processes=2) == recipes.check_all(few, here)
    (found,) = recipes.check_all({"crash": Crash()}, here, processes=2)  # type: ignore[dict-item]
    assert found.problem == "a process that tried recipes crashed"


class Crash:
    """Ends the process that gets it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)
