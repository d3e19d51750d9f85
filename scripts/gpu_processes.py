"""Programs that run beside each other, each in a process group of its own, until they end or their time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

TOO_LONG = 124
"""Exit code of a program that was ended since its time was up."""

GRACE = 3.0
"""Seconds that a program has to end by itself after it was told to."""

POLL = 0.05
"""Seconds between two looks at what runs."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command with a limit.

    Args:
        words: of the command.
        log: file of what it prints.
        seconds: after which it is ended with all that it started.
    """

    words: Sequence[str]
    log: Path
    seconds: float


def run_beside(
    programs: Sequence[Program],
    *,
    environment: Mapping[str, str],
    folder: Path,
    every: float,
    meanwhile: Callable[[], None],
    ended: Callable[[int, int], None],
) -> None:
    """Start all programs and wait until the last has ended.

    Args:
        folder: their working directory.
        every, meanwhile: what is called each so many seconds while one runs.
        ended: called with the place of a program and its exit code as soon as it has ended.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        running: dict[int, subprocess.Popen[bytes]] = {}
        for place, program in enumerate(programs):
            log = stack.enter_context(program.log.open("wb"))
            running[place] = start(program, log.fileno(), environment, folder)
            stack.callback(end_group, running[place])
        calls = 0
        while running:
            passed = time.monotonic() - began
            for place, process in list(running.items()):
                code = process.poll()
                if code is None and passed >= programs[place].seconds:
                    end_group(process)
                    code = TOO_LONG
                if code is not None:
                    end_group(running.pop(place))
                    ended(place, code)
            if passed >= (calls + 1) * every:
                calls = int(passed / every)
                meanwhile()
            time.sleep(POLL)


def start(
    program: Program, log: int, environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """The process of a program, whose output goes to the open file `log`."""
    return subprocess.Popen(
        program.words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started; what has ended stays as it is."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
