"""A small storm; `python scripts/storm.py` runs larger ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import storm
from command_line import PATIENCE

ROOT = Path(__file__).parents[2]
COUNTS = {"parts": 25, "damages": 80, "inputs": 2, "corruption": 5}


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
    assert len(rows) == 9 and sum(int(row[3]) for row in rows) == sum(COUNTS.values()) + 5


def test_trials_are_counted_by_kind_and_a_failed_one_is_told() -> None:
    power = {("power", number): ("start", number > 0, "other losses") for number in range(3)}
    lines, failures = storm.table({("power", 3): ("swap", True, "")} | power)
    assert lines[2:] == [
        "| power | start | 3 | 2 | 1 |",
        "| power | swap | 1 | 1 | 0 |",
        "| **power** | all | 4 | 3 | 1 |",
    ]
    assert failures == ["power 0 (start): other losses"]
