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
    folder = tmp_path_factory.mktemp("te")
    printed = folder / "out"
    errors = folder / "err"
    if variables := getattr(request.module, "ENVIRONMENT", {}):
        with printed.open("w") as out, errors.open("w") as err:
            code = subprocess.run(
                [sys.executable, str(program)],
                stdout=out,
                stderr=err,
                env=environment(**variables),
            ).returncode
    else:
        process = request.getfixturevalue("server")
        job = {"program": str(program), "out": str(printed), "err": str(errors)}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the process that imports Transformer Engine has ended"
        code = int(answer)
    if code:
        pytest.fail(errors.read_text("utf-8")[-3000:])
    return json.loads(printed.read_text("utf-8"))
