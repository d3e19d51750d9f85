"""What a command is started in: closed standard streams, little memory."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from storms.ground import EXPORTS, ON, SCENARIOS, SHAPE, Ground, Result, call, losses

STREAMS = ("<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-")
STREAMED = (
    *((SCENARIOS[name].command, 0) for name in ("resume", "start", "swap")),
    *(
        (("plan", "runs/a"), 0),
        (("formats",), 0),
        (("compare", "runs/a", "runs/a"), 0),
        (("report", "runs/a"), 0),
    ),
    *((SCENARIOS[name].command, 0) for name in EXPORTS),
    *(
        (("resume=runs/nowhere",), 1),
        (("train.steps=no",), 1),
        (("swap", "runs/a", "recipe=nowhere"), 1),
    ),
)
"""Commands, and the exit codes that they have."""
SPARE = 3 << 30
"""Bytes of address space above what torch takes."""
SMALL = (
    *(scenario.command for scenario in SCENARIOS.values()),
    *(
        ("plan", "runs/a"),
        ("formats",),
        ("compare", "runs/a", "runs/a"),
        ("report", "runs/a"),
        ("swap", "runs/a"),
    ),
    *(
        ("doctor", "--json"),
        ("swap", "runs/a", "recipe=bf16"),
        ("plan", *SHAPE, "data.path=../text.txt"),
    ),
)


def stream_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A process of its own, because Python looks at the streams when it starts."""
    ground.copy(place)
    streams = STREAMS[-1 - number % len(STREAMS)]
    command, code = STREAMED[number % len(STREAMED)]
    shell = f'"$@" {streams}'
    words = ["sh", "-c", shell, "sh", sys.executable, "-m", "fp4train", *command]
    ended = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=600)
    seen = "" if ended.returncode == code else f"exit {ended.returncode}, not {code}"
    if "Traceback" in ended.stdout + ended.stderr:
        seen = "a traceback"
    if command is ON and losses(place / "runs/a") != ground.undisturbed("resume").result["losses"]:
        seen = seen or "other losses"
    return Result(
        streams,
        not seen,
        seen and f"{' '.join(command)}: {seen}: {ended.stdout[-200:]}{ended.stderr[-300:]}",
    )


@contextlib.contextmanager
def small_memory(spare: int = SPARE) -> Iterator[None]:
    """The address space of this process is limited to what it has and `spare`, as by `ulimit
    -v`.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    yield


def memory_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each verb in turn with `SPARE` bytes above what torch takes."""
    ground.copy(place)
    command = SMALL[number % len(SMALL)]
    verb = command[0] if "=" not in command[0] else "train"
    code, out = call(place, *command, around=small_memory)
    passed = code == 0 and "Traceback" not in out
    return Result(
        verb, passed, "" if passed else f"{' '.join(command[:3])}: exit {code}: {out[-400:]}"
    )
