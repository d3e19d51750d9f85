"""A small storm; `python scripts/storm.py` runs larger ones."""

import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from command_line import PATIENCE
from storms.ground import end_measured
from storms.report import HEADER, write_report

ROOT = Path(__file__).parents[2]
COUNTS = {"parts": 60, "damages": 150, "hostile": 4, "foreign": 6, "texts": 6, "inputs": 2}
COUNTS |= {"corruption": 4}


@pytest.mark.long
def test_a_small_storm_finds_nothing() -> None:
    command = [
        sys.executable,
        "scripts/storm.py",
        "others=1",
        *(f"{name}={count}" for name, count in COUNTS.items()),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("| **")]
    assert len(rows) == 14 and sum(int(row[3]) for row in rows) == sum(COUNTS.values()) + 7


def test_a_storm_refuses_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["storm.py", "kils=1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts/storm.py"), run_name="__main__")
    assert ended.value.code == 2 and "unknown: kils" in capsys.readouterr().err


def test_a_report_of_some_storms_keeps_the_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reliability.md"
    path.write_text("# Fault tests\n\n## What a checkpoint costs\n\nMuch.\n")
    monkeypatch.setattr("storms.report.REPORT", path)
    storms = ("kills", "power", "inputs")
    power = {("power", number): ("start", number > 0, "other losses") for number in range(3)}
    inputs = {("inputs", 0): ("gpus", True, "")}
    write_report({**inputs, **power}, storms, "power=3 inputs=1")
    write_report({("kills", 0): ("export", True, "")}, storms, "kills=1")
    lines = path.read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| ", "- "))]
    assert rows == [
        HEADER[0],
        "| kills | export | 1 | 1 | 0 |",
        "| **kills** | all | 1 | 1 | 0 |",
        HEADER[0],
        "| power | start | 3 | 2 | 1 |",
        "| **power** | all | 3 | 2 | 1 |",
        "| inputs | gpus | 1 | 1 | 0 |",
        "| **inputs** | all | 1 | 1 | 0 |",
        "- power 0 (start): other losses",
    ]
    commands = [line.split("`")[1] for line in lines if line.startswith("`python")]
    assert commands == [
        f"python scripts/storm.py {words}" for words in ("kills=1", "power=3 inputs=1")
    ]
    write_report({**inputs, ("power", 0): ("start", True, "")}, storms, "inputs=1 power=1")
    text = path.read_text()
    assert "power=3" not in text and "other losses" not in text and "| kills | export" in text
    assert text.endswith("## What a checkpoint costs\n\nMuch.\n")


def test_the_memory_that_a_command_holds_at_most_is_measured(tmp_path: Path) -> None:
    peaks = []
    for size in (0, 64 << 20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            pid = os.fork()
        if not pid:
            len(b"x" * size)
            os._exit(0)
        peaks.append(end_measured(pid, tmp_path).peak)
    assert 60 << 20 < peaks[1] - peaks[0] < 70 << 20
