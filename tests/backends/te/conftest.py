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


def environment(**more: str) -> dict[str, str]:
    """That of a process that runs such a program."""
    places = (TESTS.parent, TESTS / "helpers", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(str(place) for place in places)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


@pytest.fixture(scope="package")
def server() -> Iterator["subprocess.Popen[str]"]:
    """The process whose forks run programs (`te_server`): Transformer Engine is imported once."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "te_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        yield process


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the module's `PROGRAM`, with Transformer Engine's real Python in a process of its own,
    prints; the process has the module's `ENVIRONMENT`, too.
    """
    program: Path = request.module.PROGRAM
    if wanted := getattr(request.module, "ENVIRONMENT", {}):
        done = subprocess.run(
            [sys.executable, str(program)],
            capture_output=True,
            text=True,
            env=environment(**wanted),
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        process = request.getfixturevalue("server")
        folder = tmp_path_factory.mktemp("te")
        files = {name: str(folder / name) for name in ("out", "err")}
        process.stdin.write(json.dumps({"program": str(program), **files}) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        out, err = (Path(file).read_text("utf-8") for file in files.values())
    if code:
        pytest.fail(err[-3000:])
    return json.loads(out)
