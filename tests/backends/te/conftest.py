"""Programs that run Transformer Engine's Python without a GPU."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Any:
    """What the module's `PROGRAM`, with Transformer Engine's real Python in a process of its own,
    prints; the process has the module's `ENVIRONMENT`, too.
    """
    program = request.module.PROGRAM
    path = os.pathsep.join([str(program.parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment |= getattr(request.module, "ENVIRONMENT", {})
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
    return json.loads(done.stdout)
