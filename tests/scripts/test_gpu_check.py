"""scripts/gpu_check.sh: its dry run, its limits, and what it does with steps that fail, hang, or cannot run."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_check
import gpu_results
import pytest
from gpu_check import PARTS, Check, Step

SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")


def flat(steps: Iterable[Step]) -> list[Step]:
    """All steps, those that run beside others, too."""
    return [program for step in steps for program in (step, *step.beside)]


def steps_with(text: str, lines: list[str]) -> set[str]:
    """The steps of which a line says this."""
    return {
        line.split(": ")[0].removeprefix("== ")
        for line in lines
        if line.startswith("== ") and text in line
    }


@pytest.mark.long
def test_a_dry_run_executes_every_part_and_keeps_its_results(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "back"),
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "carried").mkdir()
    for name in ("install.sh", "probe.py"):
        (tmp_path / "carried" / name).write_text("exit 1\n")
    command = ["bash", str(SCRIPT), "out/x", *PARTS, "--te", "carried", "--dry-run"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    parts = [line.split()[1].rstrip(":") for line in lines if line.startswith("==== ")]
    assert parts == list(PARTS)
    executed, asked = (steps_with(text, lines) for text in (": ended, ", ": on a GPU: "))
    only_named = steps_with(": only named", lines)
    assert asked - executed == only_named == {"te install", "te probe"}, "no stand-in for these"
    assert lines[-1] == "gpu_check: cannot run here: te install, te probe"
    names = {step.name for part in PARTS for step in flat(gpu_check.steps_of(part, tmp_path, None))}
    assert names <= executed
    with tarfile.open(tmp_path / "back" / "x.tgz") as archive:
        assert {"x-kernels.json", "x-pieces.json", "x-te.json", "x.done"} <= {*archive.getnames()}
        for name in ("blocks", "exact", "profile", "bandwidth", "native", "te"):
            rows = json.load(archive.extractfile(f"x-{name}.json"))["rows"]  # type: ignore[arg-type]
            assert len(rows) > 2 and all(row["ok"] for row in rows), name


@pytest.fixture
def take(tmp_path: Path) -> Any:
    """`take(steps, seconds)`: the steps that failed of a call that ends after so long."""

    def taken(steps: Iterable[Step], seconds: float = 500.0) -> list[str]:
        ends = time.monotonic() + seconds
        check = Check(out=tmp_path / "x", archive=tmp_path / "back", ends=ends)
        check.take(steps)
        return check.failed

    return taken


def shell(name: str, command: str, **options: Any) -> Step:
    return Step(name=name, asks="", words=("bash", "-c", command), **options)


def packed(tmp_path: Path) -> set[str]:
    with tarfile.open(tmp_path / "back" / "x.tgz") as archive:
        return set(archive.getnames())


def test_a_step_that_ended_is_not_run_again_and_results_of_one_that_failed_come_back(
    take: Any, tmp_path: Path
) -> None:
    count = f"echo >> {tmp_path}/x-"
    steps = [
        shell("good", f"{count}good"),
        shell("absent", f"{count}absent; exit 3"),
        shell("bad", f"{count}bad; echo why >&2; exit 1"),
    ]
    assert [take(steps), take(steps)] == [["bad"], ["bad"]]
    runs = {name: (tmp_path / f"x-{name}").read_text() for name in ("good", "absent", "bad")}
    assert runs == {"good": "\n", "absent": "\n\n", "bad": "\n\n"}
    assert {"x-bad", "x-bad.log"} <= packed(tmp_path)
    assert (tmp_path / "x-bad.log").read_text() == "why\n"
    assert take(steps[:2]) == [], "what cannot run on a machine is no failure"


@pytest.mark.long
def test_steps_beside_each_other_share_a_limit_and_each_is_noted_when_it_ends(
    take: Any, tmp_path: Path
) -> None:
    meets = f"touch {tmp_path}/x-{{0}}; until [ -e {tmp_path}/x-{{1}} ]; do sleep 0.1; done"
    hangs = shell("hangs", f"until grep -q ^b {tmp_path}/x.done; do sleep 0.1; done; sleep 60")
    beside = (shell("b", meets.format("b", "a")), hangs)
    assert take([shell("a", meets.format("a", "b"), beside=beside, limit=5)]) == ["hangs"]
    assert sorted((tmp_path / "x.done").read_text().split()) == ["a", "b"]


@pytest.mark.long
def test_total_bounds_the_whole_call_whatever_a_step_does(
    take: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is there for minutes is taken away then, with what was not packed."""
    monkeypatch.setattr(gpu_check, "GRACE", 0.5)
    stubborn = shell(
        "stubborn", f"trap '' TERM; echo > {tmp_path}/x-found.json; while :; do sleep 0.2; done"
    )
    began = time.monotonic()
    assert take([stubborn, shell("next", "true")], 3.0) == ["stubborn"]
    assert time.monotonic() - began < 12.0
    assert not (tmp_path / "x.done").exists()
    assert {"x-found.json", "x-stubborn.log"} <= packed(tmp_path)


@pytest.mark.long
def test_a_step_has_a_limit_of_its_own_and_what_it_leaves_is_for_the_next(
    take: Any, tmp_path: Path
) -> None:
    """Of a sixth of nine minutes each gets a sixth of its limit."""
    hangs = shell("hangs", "sleep 60", limit=6)
    quick = shell("quick", "true", limit=60)
    longer = shell("longer", "sleep 3", limit=6)
    began = time.monotonic()
    assert take([hangs, quick, longer], gpu_check.NINE / 6) == ["hangs"]
    assert time.monotonic() - began < 30
    assert (tmp_path / "x.done").read_text().split() == ["quick", "longer"]


def test_a_part_stops_at_a_gate_that_is_not_passed(take: Any, tmp_path: Path) -> None:
    after = shell("next", f"touch {tmp_path}/ran")
    for code in (1, 3):
        assert take([shell("gate", f"exit {code}", gate=True), after]) == ["gate"]
        assert not (tmp_path / "ran").exists()
    assert take([shell("gate", "true", gate=True), after]) == []
    assert (tmp_path / "ran").exists()


def test_a_first_visit_takes_nine_minutes_and_is_what_a_call_without_parts_runs(
    tmp_path: Path,
) -> None:
    steps = list(gpu_check.steps_of("nine", tmp_path / "x", None))
    assert steps[0].gate and all(step.limit is not None for step in steps)
    assert 500 < sum(step.limit or 0 for step in steps) <= gpu_check.NINE - gpu_check.ENDING
    names = [step.name for step in steps]
    assert names.index("nine exact") < names.index("nine bandwidth") < names.index("nine profile")
    assert gpu_check.read(["x", "--total", "9"]).parts == ["nine"]


def test_a_carried_transformer_engine_is_probed_before_its_layers_run_within_210_seconds(
    tmp_path: Path,
) -> None:
    install, probe, layers = gpu_check.steps_of("te", tmp_path / "x", tmp_path)
    assert install.gate and probe.gate and not layers.gate
    assert probe.command()[-1] == str(tmp_path / "probe.py") and (probe.limit or 0) <= 30
    assert sum(step.limit or 0 for step in (install, probe, layers)) <= 210 - gpu_check.ENDING


@pytest.mark.long
def test_without_a_gpu_nothing_runs_and_the_exit_code_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(SCRIPT), "out/x", "--total", "9"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert "sees no GPU; nothing ran" in done.stderr and "====" not in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["te"], "before the parts"),
        (["x", "kernles"], "unknown part kernles"),
        (["x", "--te", "gone"], "holds no install.sh"),
        (["x", "--total", "0.3"], "leaves nothing"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(words)
    assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_what_failed_is_tried_again_and_what_worked_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    results = gpu_results.Results(path)
    results.add({"name": "good", "ok": True})
    results.add({"name": "bad", "ok": False})
    assert results.code == 1
    again = gpu_results.Results(path)
    assert again.has("good") and not again.has("bad")
    monkeypatch.setattr(gpu_results, "machine", lambda: {"gpu": "B200"})
    assert not gpu_results.Results(path).has("good"), "another machine begins anew"
