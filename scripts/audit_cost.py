"""What audits at their defaults cost a run on a CPU, against the same run without them, in turn.

    python scripts/audit_cost.py [pairs=6] [out=LINES.md] [dry=true] [also key=value of a run]

Runs the default configuration in a process of its own, with audits and without, so many times each.
The two of a pair take turns of two seconds. The one that begins takes a little more, so that every
other pair begins with the one without, and the number of pairs is even. Prints the medians of user
CPU seconds and of wall time and the share that audits add, and writes these lines to `out` for
benchmarks/audit.md. `dry=true` prints the two commands and runs nothing.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

WITH = "with audits"
WITHOUT = "without audits"
AUDITS = {WITH: (), WITHOUT: ("audit.every=0", "audit.sums=0")}


SLICE = 2.0
"""Seconds that a run goes on before it is the other's turn."""


class Times(NamedTuple):
    """Seconds of a run: of user code on all cores, and of the clock."""

    user: float
    wall: float


def command(way: str, folder: Path, words: Sequence[str]) -> list[str]:
    """The command of a run in a folder."""
    return [sys.executable, "-m", "fp4train", f"run.dir={folder}", *words, *AUDITS[way]]


def measured(*commands: Sequence[str]) -> list[Times]:
    """The times of processes that run in turn: each in slices of `SLICE` seconds, stopped between.

    What slows the machine for a while slows them alike, and none of them beside another.

    Raises:
        SystemExit: one ended with an error.
    """
    processes = [TimedProcess(command) for command in commands]
    try:
        while running := [process for process in processes if process.times is None]:
            for process in running:
                process.run_slice()
    finally:
        for process in processes:
            process.kill()
    return [process.times for process in processes if process.times is not None]


class TimedProcess:
    """A process that runs only within `run_slice`; `times` are known when it has ended.

    Its wall time is the sum of its slices. It has a process group of its own, which is stopped whole.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.times: Times | None = None
        self._wall = 0.0
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        self._process: subprocess.Popen[bytes] | None = None

    def run_slice(self) -> None:
        """Start the process or let it go on, for `SLICE` seconds or until it ends."""
        began = time.perf_counter()
        if self._process is None:
            self._process = subprocess.Popen(
                self.command,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            os.killpg(self._process.pid, signal.SIGCONT)
        while time.perf_counter() - began < SLICE:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._wall += time.perf_counter() - began
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._check()
                self.times = Times(usage.ru_utime, self._wall)
                return
            time.sleep(0.01)
        os.killpg(self._process.pid, signal.SIGSTOP)
        self._wall += time.perf_counter() - began

    def _check(self) -> None:
        assert self._process is not None
        if self._process.returncode:
            self._printed.seek(0)
            last = self._printed.read().decode(errors="replace")[-2000:]
            command = shlex.join(self.command)
            raise SystemExit(f"{command} ended with {self._process.returncode}:\n{last}")

    def kill(self) -> None:
        """End the process if it has not ended."""
        self._printed.close()
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def run_in_turn(pairs: int, words: Sequence[str]) -> dict[str, list[Times]]:
    """The times of so many runs of each way. A run of one step before them fills the caches."""
    times: dict[str, list[Times]] = {way: [] for way in AUDITS}
    with tempfile.TemporaryDirectory() as place:
        measured(command(WITH, Path(place) / "first", [*words, "train.steps=1"]))
        for number in range(pairs):
            ways = list(AUDITS) if number % 2 == 0 else list(reversed(AUDITS))
            folders = [Path(place) / f"{number}-{len(AUDITS[way])}" for way in ways]
            commands = [
                command(way, folder, words) for way, folder in zip(ways, folders, strict=True)
            ]
            for way, of_way in zip(ways, measured(*commands), strict=True):
                times[way].append(of_way)
                print(f"pair {number + 1}, {way}: {of_way}", file=sys.stderr, flush=True)
    return times


def lines(times: dict[str, list[Times]], words: Sequence[str]) -> list[str]:
    """A Markdown table of the medians, and the share that audits add."""
    pairs = len(times[WITH])
    table = ["| run | user CPU | wall |", "|---|---|---|"]
    medians = {}
    for way, of_way in times.items():
        medians[way] = Times(*(median(column) for column in zip(*of_way, strict=True)))
        table.append(f"| {way} | {medians[way].user:.2f} s | {medians[way].wall:.2f} s |")
    shares = [
        f"{audited / plain - 1:+.2%}"
        for audited, plain in zip(medians[WITH], medians[WITHOUT], strict=True)
    ]
    of_pairs = [
        audited.user / plain.user - 1
        for audited, plain in zip(times[WITH], times[WITHOUT], strict=True)
    ]
    asked = f"fp4train {' '.join(words)}".strip()
    table += [
        f"| audits add | {shares[0]} | {shares[1]} |",
        "",
        f"Medians of {pairs} runs each of `{asked}` on a CPU, in turn, "
        f"{SLICE:g} s each; user CPU of single pairs: "
        f"{min(of_pairs):+.2%} to {max(of_pairs):+.2%}.",
    ]
    return table


def script(arguments: Sequence[str]) -> int:
    given = dict(argument.partition("=")[::2] for argument in arguments)
    pairs = int(given.pop("pairs", "6"))
    out = given.pop("out", None)
    dry = given.pop("dry", "false") == "true"
    if pairs < 1 or pairs % 2:
        raise SystemExit(
            f"pairs={pairs}: an even number, since the run that begins a pair takes more"
        )
    words = [f"{key}={value}" for key, value in given.items()]
    if dry:
        for way in AUDITS:
            print(f"{way}: {shlex.join(command(way, Path('FOLDER'), words))}")
        return 0
    text = "\n".join(lines(run_in_turn(pairs, words), words)) + "\n"
    print(text, end="")
    if out is not None:
        Path(out).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
