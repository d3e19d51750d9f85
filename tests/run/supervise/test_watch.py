"""What watches a run: its heartbeat, and the alarm for a step that hangs."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import (
    PATIENCE,
    STEADY,
    Cli,
    losses,
)


def test_a_heartbeat_says_how_far_a_run_is(cli: Cli) -> None:
    began = time.time()
    assert cli("run.name=a", "train.steps=3", *STEADY).code == 0
    beat = json.loads(Path("runs/a/heartbeat.json").read_text())
    assert (beat["step"], beat["of"], beat["saved"], beat["running"]) == (3, 3, 3, False)
    assert began <= beat["time"] <= time.time() and beat["loss"] == losses("runs/a")[3][0]
    assert beat["run"] in Path("runs/a/config.yaml").read_text().splitlines()[0]


HANGS = """
import sys, time
from fp4train.cli import main
from fp4train.data import Loader
original = Loader.rows
def rows(loader, first, count):
    if first == 8:
        time.sleep(1000)
    return original(loader, first, count)
Loader.rows = rows
main(sys.argv[1:])
"""


@pytest.mark.long
def test_a_step_whose_tokens_do_not_come_says_so_and_ends_the_run_with_its_stacks(cli: Cli) -> None:
    arguments = cli.tiny("run.name=a", "train.step_timeout=6", "checkpoint.every=1", *STEADY)
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, *arguments],
        cwd=cli.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (
        ended.returncode == -signal.SIGALRM
        and "Timeout (0:00:06)!" in ended.stderr
        and "in agree" in ended.stderr
    )
    (said,) = [line for line in ended.stderr.splitlines() if "a slow disk?" in line]
    assert "step 2 waits" in said and "s for sequences 8–11 of the train tokens of" in said
    assert "train.step_timeout=6 ends the run" in said
    assert cli("resume=runs/a", "train.step_timeout=0").code == 0
