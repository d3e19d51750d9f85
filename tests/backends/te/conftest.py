"""Programs that run Transformer Engine's Python without a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parents[1]


@pytest.fixture(scope="package")
def server() -> Iterator["subprocess.Popen[str]"]:
    """The process whose forks run programs (`te_server`): Transformer Engine is imported once."""
    places = (TESTS.parent, TESTS / "helpers", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, places))
    with subprocess.Popen(
        [sys.executable, str(HERE / "te_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    ) as process:
        yield process


@pytest.fixture(scope="module")
def report(
    request: pytest.FixtureRequest,
    server: "subprocess.Popen[str]",
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """What the module's `PROGRAM`, with Transformer Engine's real Python in a process of its own,
    prints.
    """
    folder = tmp_path_factory.mktemp("te")
    printed = folder / "out"
    errors = folder / "err"
    job = {"program": str(request.module.PROGRAM), "out": str(printed), "err": str(errors)}
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that imports Transformer Engine has ended"
    if int(answer):
        pytest.fail(errors.read_text("utf-8")[-3000:])
    return json.loads(printed.read_text("utf-8"))
