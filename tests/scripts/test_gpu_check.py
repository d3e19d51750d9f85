"""scripts/gpu_check.sh: its dry run, its limits, and what it does with steps that fail, hang, or cannot run."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gpu_check
import gpu_results
import pytest
from gpu_check import PARTS, Check, Step

SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")


def flat(steps: Iterable[Step]) -> list[Step]:
    """All steps, those that run beside others, too."""
    return [each for step in steps for each in (step, *step.beside)]


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
    (tmp_path / "carried/install.sh").write_text("exit 1\n")
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
    assert asked - executed == only_named == {"te install"}, "no stand-in for these"
    assert lines[-1] == "gpu_check: cannot run here: te install"
    names = {step.name for part in PARTS for step in flat(gpu_check.steps_of(part, tmp_path, None))}
    assert names <= executed
    with tarfile.open(tmp_path / "back" / "x.tgz") as archive:
        assert {"x-kernels.json", "x-state.json", "x-te.json", "x.done"} <= {*archive.getnames()}
        for name in ("first", "exact", "profile", "bandwidth", "native", "te"):
            rows = json.load(archive.extractfile(f"x-{name}.json"))["rows"]  # type: ignore[arg-type]
            assert len(rows) > 2 and all(row["ok"] for row in rows), name


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`check(step, …)`: a call of the part `nine`, which runs these steps."""

    def called(*steps: Step, seconds: float = 60.0) -> Check:
        monkeypatch.setattr(gpu_check, "steps_of", lambda *_: iter(steps))
        ends = time.monotonic() + seconds
        found = Check(out=tmp_path / "x", archive=tmp_path / "back", ends=ends)
        found.part("nine")
        return found

    yield called


def shell(name: str, command: str, **options: Any) -> Step:
    return Step(name=name, asks="", words=("bash", "-c", command), **options)


def packed(tmp_path: Path) -> set[str]:
    with tarfile.open(tmp_path / "back" / "x.tgz") as archive:
        return set(archive.getnames())


def test_a_step_that_ended_is_not_run_again_and_others_are(check: Any, tmp_path: Path) -> None:
    count = f"echo >> {tmp_path}/"
    steps = (
        shell("good", f"{count}good"),
        shell("absent", f"{count}absent; exit 3"),
        shell("bad", f"{count}bad; exit 1"),
    )
    assert check(*steps).failed
    assert check(*steps).failed
    assert [(tmp_path / name).read_text().count("\n") for name in ("good", "absent", "bad")] == [
        1,
        2,
        2,
    ]
    assert not check(*steps[:2]).failed, "what cannot run on a machine is no failure"


def test_results_of_a_step_that_failed_come_back(check: Any, tmp_path: Path) -> None:
    check(shell("bad", f"echo half > {tmp_path}/x-half.json; echo why >&2; exit 1"))
    assert {"x-half.json", "x-bad.log"} <= packed(tmp_path)
    assert (tmp_path / "x-bad.log").read_text() == "why\n"


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = shell(
        "hangs", f"(sleep 30; echo > {tmp_path}/late) & echo $! > {tmp_path}/x-pid; wait"
    )
    began = time.monotonic()
    found = check(hanging, shell("next", "true"), seconds=1.0)
    assert found.failed
    assert time.monotonic() - began < 20
    assert "== hangs: FAILED (124)" in capsys.readouterr().out
    assert found.summary() == "failed: hangs; no time was left, call it again: next"
    pid = int((tmp_path / "x-pid").read_text())
    with pytest.raises(ProcessLookupError):
        while (status := Path(f"/proc/{pid}/stat")).exists() and status.read_text().split()[
            2
        ] == "Z":
            raise ProcessLookupError  # ended, and not yet waited for
        os.kill(pid, 0)
    assert "x-pid" in packed(tmp_path)


def test_steps_beside_each_other_share_a_limit_and_each_is_noted_when_it_ends(
    check: Any, tmp_path: Path
) -> None:
    meets = f"touch {tmp_path}/x-{{0}}; until [ -e {tmp_path}/x-{{1}} ]; do sleep 0.1; done"
    hangs = shell("hangs", f"until grep -q ^second {tmp_path}/x.done; do sleep 0.1; done; sleep 60")
    steps = shell(
        "first", meets.format("a", "b"), beside=(shell("second", meets.format("b", "a")), hangs)
    )
    found = check(steps, seconds=5.0)
    assert sorted((tmp_path / "x.done").read_text().split()) == ["first", "second"]
    assert found.failed == ["hangs"]


def test_without_a_gpu_nothing_runs_and_the_exit_code_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(SCRIPT), "out/x", "--total", "9"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert "sees no GPU; nothing ran" in done.stderr and "====" not in done.stdout


def test_results_are_packed_while_a_step_runs(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole call may be ended from outside at any time."""
    monkeypatch.setattr(gpu_check, "EVERY", 0.2)
    seen = f"until tar tf {tmp_path}/back/x.tgz | grep -q x-half; do sleep 0.1; done"
    assert not check(
        shell("long", f"echo half > {tmp_path}/x-half.json; {seen}"), seconds=30.0
    ).failed


def test_checkpoints_and_installed_packages_are_not_packed(check: Any, tmp_path: Path) -> None:
    for folder in ("x-run/checkpoints/step_1", "x.site/te"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "large").write_bytes(b"0" * 1000)
    (tmp_path / "x-run" / "metrics.jsonl").write_text("{}\n")
    check(shell("good", "true"))
    assert {name for name in packed(tmp_path) if "log" not in name} == {
        "x-run",
        "x-run/metrics.jsonl",
        "x.done",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: out"),
        (["te"], "before the parts"),
        (["x", "kernles"], "unknown part kernles"),
        (["x", "--te", "gone"], "holds no install.sh"),
        (["x", "--total", "0.3"], "leaves nothing"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_carried_transformer_engine_is_installed_first_and_found_afterwards(
    tmp_path: Path,
) -> None:
    install, check = gpu_check.steps_of("te", tmp_path / "x", tmp_path / "carried")
    assert install.words == ("bash", str(tmp_path / "carried/install.sh"), str(tmp_path / "x.site"))
    (tmp_path / "x.site").mkdir()
    path = Check(out=tmp_path / "x", archive=None).environment()["PYTHONPATH"]
    assert path.split(os.pathsep)[:2] == [str(gpu_check.ROOT), str(tmp_path / "x.site")]
    assert check.words[:2] == ("gpu_layers.py", "te")


def test_compiled_kernels_lie_outside_of_results_unless_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache among the results would fill what comes back from a machine; one in the tree what is
    carried to it.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    check = Check(out=tmp_path / "benchmarks" / "x", archive=tmp_path / "back")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert check.environment()["TRITON_CACHE_DIR"] == str(tmp_path / "temporary" / "x.triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/named")
    assert check.environment()["TRITON_CACHE_DIR"] == "/named"


def test_every_program_of_every_part_is_there(tmp_path: Path) -> None:
    for part in PARTS:
        for step in gpu_check.steps_of(part, tmp_path / "x", None):
            scripts = [word for word in step.command() if word.endswith(".py")]
            assert all(Path(word).is_file() for word in scripts)


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
