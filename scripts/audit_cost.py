"""What audits at their defaults cost a run on a CPU, against the same run without them, in turn.

    python scripts/audit_cost.py [pairs=5] [out=LINES.md] [dry=true] [also key=value of a run]

Runs the default configuration in a process of its own, with audits and without, so many times each;
every other pair begins with the one without. Prints the medians of user CPU seconds and of wall time
and the share that audits add, and writes these lines to `out` for benchmarks/audit.md. `dry=true`
prints the two commands and runs nothing.
"""

from __future__ import annotations

import os
import shlex
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


class Times(NamedTuple):
    """Seconds of a run: of user code on all cores, and of the clock."""

    user: float
    wall: float


def command(way: str, folder: Path, words: Sequence[str]) -> list[str]:
    """The command of a run in a folder."""
    return [sys.executable, "-m", "fp4train", f"run.dir={folder}", *words, *AUDITS[way]]


def measured(run: Sequence[str]) -> Times:
    """The times of a process.

    Raises:
        SystemExit: it ended with an error.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(run, stdout=printed, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            last = printed.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{shlex.join(run)} ended with {process.returncode}:\n{last}")
    return Times(usage.ru_utime, time.perf_counter() - began)


def run_in_turn(pairs: int, words: Sequence[str]) -> dict[str, list[Times]]:
    """The times of so many runs of each way. A run of one step before them fills the caches."""
    times: dict[str, list[Times]] = {way: [] for way in AUDITS}
    with tempfile.TemporaryDirectory() as place:
        measured(command(WITH, Path(place) / "first", [*words, "train.steps=1"]))
        for number in range(pairs):
            ways = list(AUDITS) if number % 2 == 0 else list(reversed(AUDITS))
            for way in ways:
                folder = Path(place) / f"{number}-{len(AUDITS[way])}"
                times[way].append(measured(command(way, folder, words)))
                print(f"pair {number + 1}, {way}: {times[way][-1]}", file=sys.stderr, flush=True)
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
        f"Medians of {pairs} runs each of `{asked}` on a CPU, in turn; user CPU of single pairs: "
        f"{min(of_pairs):+.2%} to {max(of_pairs):+.2%}.",
    ]
    return table


def script(arguments: Sequence[str]) -> int:
    given = dict(argument.partition("=")[::2] for argument in arguments)
    pairs = int(given.pop("pairs", "5"))
    out = given.pop("out", None)
    dry = given.pop("dry", "false") == "true"
    if pairs < 1:
        raise SystemExit("pairs: at least 1")
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
