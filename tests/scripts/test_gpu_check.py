"""scripts/gpu_check.sh: its dry run, its limits, and what it does with steps that fail, hang, or cannot run."""

import json
import os
import runpy
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gpu_bandwidth
import gpu_check
import gpu_first
import gpu_profile
import gpu_runs
import pytest
from configured import points_of
from gpu_check import PARTS, Check, Step
from pretended import Machine

SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")


def words_of(text: str) -> list[str]:
    """The configuration of a printed command."""
    words = shlex.split(text)
    return [
        word
        for word in words[words.index("fp4train") + 1 :]
        if "data" not in word and "$" not in word
    ]


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
    assert [line.split()[1].rstrip(":") for line in lines if line.startswith("==== ")] == list(
        PARTS
    )
    executed, asked = (steps_with(text, lines) for text in (": ended, ", ": on a GPU: "))
    assert {"doctor", "run bf16", "run nvfp4-compiled", "compare"} <= executed
    assert asked - executed == steps_with(": only named", lines) == {"te install", "sanitize"}, (
        "no stand-in for these"
    )
    assert lines[-1] == "gpu_check: cannot run here: te install, sanitize"
    assert {
        step.name for step in flat(gpu_check.steps_of("nine", tmp_path / "x", None))
    } <= executed
    stand_ins = {line for line in lines if line.startswith("stand-in: ")}
    assert len(stand_ins) == 12, stand_ins
    with tarfile.open(tmp_path / "back" / "x.tgz") as archive:
        names = archive.getnames()
        first, profile, step, bandwidth, exact = (
            json.load(archive.extractfile(f"x-{name}.json"))  # type: ignore[arg-type]
            for name in ("first", "profile", "step", "bandwidth", "exact")
        )
    assert {
        "x-kernels.json",
        "x-state.json",
        "x-runs.png",
        "x-bf16/metrics.jsonl",
        "x.done",
    } <= set(names)
    assert not [name for name in names if "/checkpoints/" in name]
    assert first["rows"][0]["name"] == "kernel", "what stops a first visit comes first"
    assert {row["name"] for row in first["rows"]} == set(gpu_first.DRY) and all(
        row["ok"] for row in first["rows"]
    )
    recipes, modes, counts = map(
        set, zip(*(row["name"].split(", ") for row in profile["rows"]), strict=True)
    )
    assert recipes == {*gpu_profile.RECIPES, "mxfp8"} and modes == {*gpu_profile.MODES, "emulated"}
    assert counts == {"1 microbatch", "8 microbatches"}
    backends = {row["name"]: row["backends"] for row in profile["rows"]}
    assert backends["bf16, eager, 1 microbatch"] == ["torch"], "the plan before"
    assert "emulate" in backends["nvfp4, emulated, 1 microbatch"], (
        "the plan that was applied after it"
    )
    measured = {row["name"].removeprefix("kernel ") for row in bandwidth["rows"] if row["ok"]}
    assert {*gpu_bandwidth.FEW, "copy", "product BF16"} <= measured
    assert exact["cases"] > 5 and exact["different"] == []
    large = [row["what"] for row in step["rows"] if "a native FP8 step" in row["what"]]
    assert len(large) == 2 and "eager" in large[0] and "compiled" in large[1]
    hours = [
        line for line in (tmp_path / "out/x-hours.sh").read_text().splitlines() if "recipe=" in line
    ]
    assert len(hours) == 12
    assert points_of(words_of(hours[0].split("else", 1)[1].rstrip("; fi")))


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`check(step, …)`: a call of the part `first`, which runs these steps."""

    def called(*steps: Step, seconds: float = 60.0) -> Check:
        monkeypatch.setattr(gpu_check, "steps_of", lambda *_, dry: iter(steps))
        found = Check(out=tmp_path / "x", archive=tmp_path / "back", seconds=seconds)
        found.part("first")
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


def test_the_commands_of_a_first_visit_are_understood_by_their_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with the words that a GPU machine calls it by; here they find no GPU, and say so."""
    monkeypatch.setattr(gpu_first.torch.cuda, "is_available", lambda: False)
    Machine(monkeypatch).interprets_triton(False)
    for step in flat(gpu_check.steps_of("nine", tmp_path / "x", None)):
        script, *words = step.words
        with gpu_check.arguments([script, *words]), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(gpu_check.SCRIPTS / script), run_name="__main__")
        assert ended.value.code == gpu_check.LEFT_OUT, (step.name, capsys.readouterr())


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


def test_the_script_takes_python3_and_paths_from_where_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(f'#!/bin/bash\necho "$PWD" "$@" > {tmp_path}/called\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {
        "PATH": f"{tmp_path}:/usr/bin:/bin"
    }
    subprocess.run(
        ["bash", str(SCRIPT), "out/x", "first"], cwd=tmp_path, env=environment, check=True
    )
    root, *words = (tmp_path / "called").read_text().split()
    assert Path(root) == SCRIPT.parents[1]
    given = gpu_check.read(words[2:])
    assert given.out == tmp_path / "out/x" and given.parts == ["first"]


def test_a_dry_run_needs_no_name_and_says_where_its_results_are(tmp_path: Path) -> None:
    """`bash scripts/gpu_check.sh --dry-run` as it is written, here with the part that starts
    nothing.
    """
    kept = {k: v for k, v in os.environ.items() if k != "OUT"}
    environment = kept | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    command = ["bash", str(SCRIPT), "--dry-run", "hours"]
    done = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, check=True
    )
    (written,) = tmp_path.glob("gpu_check_*/dry-hours.sh")
    assert done.stdout.splitlines()[0] == f"results: {written.parent}/dry-*"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: out"),
        (["te"], "before the parts"),
        (["x", "kernles"], "unknown part kernles"),
        (["x", "--te", "gone"], "holds no install.sh"),
        (["x", "--total", "0"], "must be positive"),
        (["x", "--total", "0.3"], "leaves nothing"),
        (["x", "--total", "9", "--minutes", "2"], "not allowed with argument"),
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
    install, check, _ = gpu_check.steps_of("te", tmp_path / "x", tmp_path / "carried")
    assert install.words == ("bash", str(tmp_path / "carried/install.sh"), str(tmp_path / "x.site"))
    (tmp_path / "x.site").mkdir()
    path = Check(out=tmp_path / "x", archive=None, seconds=1.0).environment()["PYTHONPATH"]
    assert path.split(os.pathsep)[:2] == [str(gpu_check.ROOT), str(tmp_path / "x.site")]
    assert check.words[0] == "te_selfcheck.py"


def test_compiled_kernels_lie_outside_of_results_unless_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache among the results would fill what comes back from a machine; one in the tree what is
    carried to it.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    check = Check(out=tmp_path / "benchmarks" / "x", archive=tmp_path / "back", seconds=1.0)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert check.environment()["TRITON_CACHE_DIR"] == str(tmp_path / "temporary" / "x.triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/named")
    assert check.environment()["TRITON_CACHE_DIR"] == "/named"


def test_every_program_of_every_part_is_there(tmp_path: Path) -> None:
    for part in PARTS:
        for step in gpu_check.steps_of(part, tmp_path / "x", None):
            scripts = [word for word in step.command() if word.endswith(".py")]
            assert all(Path(word).is_file() for word in scripts)


@pytest.mark.long
def test_a_crash_of_one_check_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "first.py"
    program.write_text(
        "import json, os, sys, time\nname = sys.argv[2]\n"
        "if name == 'crash': os.kill(os.getpid(), 11)\nif name == 'hang': time.sleep(60)\n"
        "print('noise'); print(json.dumps({'name': name, 'ok': True, 'note': '', 'seconds': "
        "0.0}))\n"
    )
    monkeypatch.setattr(gpu_first, "__file__", str(program))
    monkeypatch.setattr(gpu_first, "PATIENCE", 2.0)
    monkeypatch.setattr(
        gpu_first, "checks", lambda dry: [(name, str) for name in ("crash", "hang", "good")]
    )
    monkeypatch.setattr(gpu_first.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_runs, "machine", lambda: {"gpu": "H200"})
    assert gpu_first.main(["--out", str(tmp_path / "first.json")]) == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "first.json").read_text())["rows"]}
    assert [rows[name]["ok"] for name in ("crash", "hang", "good")] == [False, False, True]
    assert "ended with -11" in rows["crash"]["note"] and "hangs" in rows["hang"]["note"]


def test_what_failed_is_tried_again_and_what_worked_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    here = {"gpu": "H200"}
    results = gpu_runs.Results(path, here)
    results.add({"name": "good", "ok": True})
    results.add({"name": "bad", "ok": False})
    assert results.code == 1
    again = gpu_runs.Results(path, here)
    assert again.has("good") and not again.has("bad")
    assert not gpu_runs.Results(path, {"gpu": "B200"}).has("good"), "another machine begins anew"
