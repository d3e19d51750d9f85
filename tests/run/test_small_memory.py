"""Every verb works on a machine with 3 GiB for it: what is read takes the memory that it has
bytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import STEADY, Cli

CHILD = """
import json, resource, sys
from pathlib import Path
from fp4train import train
from fp4train.cli import main
import matplotlib.pyplot
kilobytes = next(l.split()[1] for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmSize"))
limit = 1024 * int(kilobytes) + (3 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise
"""
"""Runs commands with 3 GiB of address space above what torch takes."""


def within_3_gib(cli: Cli, *commands: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(commands)],
        cwd=cli.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_every_verb_works_within_3_gib_of_address_space(cli: Cli) -> None:
    within_3_gib(
        cli,
        cli.tiny("run.name=a", "train.steps=1", "eval.errors_every=1", *STEADY),
        cli.tiny("resume=runs/a", "train.steps=2"),
        ["plan", "runs/a"],
        ["compare", "runs/a", "runs/a"],
        ["swap", "runs/a"],
        ["rank", "runs/a", "recipe=bf16,nvfp4", "steps=1", "forks=2", "batches=1"],
        ["sensitivity", "runs/a", "batches=1", "repeats=2"],
        ["report", "runs/a"],
        ["formats"],
        ["doctor"],
    )
    assert "rank-2-" in next(
        path.name for path in Path("runs/a/studies").iterdir() if path.name.startswith("rank")
    )
