"""scripts/gpu_check.sh --total: the limits of a call and of its steps, and the order of a first visit."""

import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import Check, Step


def shell(name: str, command: str, **options: Any) -> Step:
    return Step(name=name, asks="", words=("bash", "-c", command), **options)


def packed(tmp_path: Path) -> set[str]:
    with tarfile.open(tmp_path / "back" / "x.tgz") as archive:
        return set(archive.getnames())


@pytest.fixture
def whole_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`whole_call(steps, *words)`: the exit code of a call where there is a GPU, whose part `nine`
    has these steps.
    """

    def called(steps: Iterable[Step], *words: str) -> int:
        monkeypatch.setattr(gpu_check, "steps_of", lambda *_: iter(steps))
        monkeypatch.setattr(Check, "why_no_gpu", lambda self: None)
        monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
        return gpu_check.main([str(tmp_path / "x"), "--archive", str(tmp_path / "back"), *words])

    yield called


def test_total_bounds_the_whole_call_whatever_a_step_does(
    whole_call: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A machine that is there for minutes is taken away then, with what was not packed."""
    monkeypatch.setattr(gpu_check, "ENDING", 5.9)
    monkeypatch.setattr(gpu_check, "GRACE", 0.5)
    stubborn = shell(
        "stubborn",
        f"trap '' TERM; echo found > {tmp_path}/x-found.json; while :; do sleep 0.2; done",
    )
    began = time.monotonic()
    assert whole_call([stubborn, shell("next", "true")], "--total", "0.2") == 1
    assert time.monotonic() - began < 12.0
    assert capsys.readouterr().out.endswith(
        "failed: stubborn; no time was left, call it again: next\n"
    )
    assert {"x-found.json", "x-stubborn.log"} <= packed(tmp_path)


def test_a_step_has_a_limit_of_its_own_and_what_it_leaves_is_for_the_next(
    whole_call: Any, tmp_path: Path
) -> None:
    """Of 1.5 minutes, a sixth of nine, each gets a sixth of its limit."""
    hangs = shell("hangs", "sleep 60", limit=6)
    quick = shell("quick", "true", limit=60)
    longer = shell("longer", "sleep 3", limit=6)
    began = time.monotonic()
    assert whole_call([hangs, quick, longer], "--total", "1.5") == 1
    assert time.monotonic() - began < 30
    assert (tmp_path / "x.done").read_text().split() == ["quick", "longer"]


@pytest.mark.parametrize("code", [1, 3])
def test_a_part_stops_at_a_gate_that_is_not_passed(
    whole_call: Any, tmp_path: Path, code: int
) -> None:
    """What cannot run is no failure elsewhere; without this step the others tell nothing."""
    steps = [shell("gate", f"exit {code}", gate=True), shell("next", f"touch {tmp_path}/ran")]
    assert whole_call(steps, "--total", "9") == 1
    assert not (tmp_path / "ran").exists()
    steps[0] = shell("gate", "true", gate=True)
    assert whole_call(steps, "--total", "9") == 0
    assert (tmp_path / "ran").exists()


def test_the_limits_of_a_first_visit_are_nine_minutes_with_its_start_and_end(
    tmp_path: Path,
) -> None:
    steps = list(gpu_check.steps_of("nine", tmp_path / "x", None))
    assert steps[0].gate and all(step.limit is not None for step in steps)
    assert 500 < sum(step.limit or 0 for step in steps) <= gpu_check.NINE - gpu_check.ENDING
    names = [step.name for step in steps]
    assert names.index("nine bandwidth") < names.index("nine profile") < names.index("nine state")


def test_without_parts_a_call_is_a_first_visit(tmp_path: Path) -> None:
    assert gpu_check.read(["x", "--total", "9"]).parts == ["nine"]
    assert gpu_check.read(["--dry-run"]).parts == ["nine"]
    assert gpu_check.read(["x", "--total", "9", "te", "profile"]).parts == ["te", "profile"]
