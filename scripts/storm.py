"""Storms of faults against real runs. Seeded and counted; `scripts/storms/` says what each trial does.

    python scripts/storm.py                     # some minutes on two cores
    python scripts/storm.py --all jobs=2        # hours
    python scripts/storm.py kills=50 damages=10000 others=0 jobs=8 seed=1 record=storm.jsonl

One trial, and when it passes:

- kills: a command that trains, measures or exports is killed (SIGKILL) once to three times at random moments. The same
  command again gives what an undisturbed one does, in every bit.
- faults: the n-th call of write, fsync, rename or open of a command that trains or exports fails (ENOSPC, EIO), or all
  from there. It ends with 0, or with 1 and a reason; the same command again gives what an undisturbed one does.
- parts: the same for a part of a command: a checkpoint, a file, a folder, an appended line, the metrics. What is there
  is the old or the new, whole, and what is lost is said.
- power: of a recorded command only what was synced until a call of fsync is kept. The same command again gives what an
  undisturbed one does; what had ended is there.
- streams: a process whose standard streams are closed at its start. It has its exit code, and no traceback.
- damages: one random change (bytes, another run's file) of a record that is then read. What is read equals what
  was written, or a message names it, or what is gone is only what a kill may cost and is written again.
- resumes: the same for any file, then a resume. It ends as an undisturbed one in every bit, with a warning where the
  file counts; or refuses in one line.
- corruption: a bit of a weight, a moment or a checkpoint's copy flips in a resumed run, one of the state at a random
  moment of a step, or a product of one step is wrong. The run's audits name it, but for a bit that flips in an update;
  the run warns or ends, as configured; a resume from the last good state ends as an undisturbed run in every bit.
- inputs: a command line with a bad value. It ends with 0, or with 1 and one line.

Trials are forks of a process that has imported everything, or calls in it; those of streams are processes. No pictures
are drawn. `others=N` is the count of the storms that are not named. `record=FILE` keeps each result as it comes: the
same command again goes on after those (--all records into storm.jsonl). Says on standard error how far it is, and which
trial failed; prints a table at the end. The exit code is 1 if a trial failed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from storms.commands import input_trial, kill_trial, stream_trial
from storms.corruption import corruption_trial
from storms.damage import damage_trial, resume_trial
from storms.faults import fault_trial, part_trial
from storms.ground import Ground, Result, lines_of, prepare
from storms.power import power_trial

ROOT = Path(__file__).parents[1]

STORMS: dict[str, tuple[Callable[[Ground, Path, random.Random, int], Result], int, int]] = {
    "kills": (kill_trial, 20, 200),
    "faults": (fault_trial, 30, 300),
    "parts": (part_trial, 300, 1000),
    "power": (power_trial, 30, 300),
    "streams": (stream_trial, 7, 20),
    "damages": (damage_trial, 1000, 5000),
    "resumes": (resume_trial, 30, 200),
    "corruption": (corruption_trial, 15, 125),
    "inputs": (input_trial, 60, 300),
}
"""By name: a trial, how many there are usually, and with --all."""
SAID_EVERY = 10.0
"""Seconds between two lines that say how far a storm is."""


def storm(name: str, numbers: list[int], ground: Ground, seed: int, record: Path) -> None:
    """The trials `numbers` of one storm, one after another; each result is a line of `record`."""
    act = STORMS[name][0]
    failed = 0
    printed = time.monotonic()
    for done, number in enumerate(numbers, start=1):
        place = ground.folder / f"{name}_{number}"
        place.mkdir()
        try:
            result = act(ground, place, random.Random(f"{seed} {name} {number}"), number)
        except Exception as error:
            result = Result("the trial itself", False, f"{type(error).__name__}: {error}")
        failed += not result.passed
        seen = "" if result.passed else result.seen
        with record.open("a") as file:
            file.write(json.dumps([seed, name, number, result.kind, result.passed, seen]) + "\n")
        shutil.rmtree(place, ignore_errors=True)
        place.with_name(f"{place.name}.out").unlink(missing_ok=True)
        if not result.passed or done == len(numbers) or time.monotonic() - printed > SAID_EVERY:
            printed = time.monotonic()
            last = "" if result.passed else f"; {result.kind}: {result.seen}"
            print(
                f"{name}: {done} of {len(numbers)}, {failed} failed{last}",
                file=sys.stderr,
                flush=True,
            )


def recorded(record: Path, seed: int) -> dict[tuple[str, int], tuple[str, bool, str]]:
    """(storm, number) → (kind, passed, seen) of the trials of `seed` that are done; a torn line is
    none.
    """
    results = {}
    for line in lines_of(record):
        with contextlib.suppress(ValueError):
            of, name, number, kind, passed, seen = json.loads(line)
            if of == seed:
                results[name, number] = kind, passed, seen
    return results


def part(counts: dict[str, int], seed: int, record: Path, mine: int, of: int) -> None:
    """The trials whose number leaves `mine` when divided by `of`, in this process."""
    import torch
    import torch._dynamo  # by torch's optimizers, and half of what a tiny run takes

    import fp4train.cli
    import fp4train.exchange.verify
    import fp4train.lab.analysis.curves
    import fp4train.lab.analysis.heatmap
    import fp4train.lab.studies.rank
    import fp4train.run.build
    import fp4train.train  # noqa: F401 - forks of this process then start at once

    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage of a trial
    done = recorded(record, seed)
    left = {
        name: [n for n in range(mine, count, of) if (name, n) not in done]
        for name, count in counts.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        ground = prepare(Path(folder)) if any(left.values()) else Ground(Path(folder))
        for name, numbers in left.items():
            storm(name, numbers, ground, seed, record)


def table(rows: Mapping[tuple[str, int], tuple[str, bool, str]]) -> tuple[list[str], list[str]]:
    """A Markdown table of the results, and a line for each trial that failed."""
    lines = ["| storm | of | trials | passed | failed |", "|---|---|---|---|---|"]

    def add(name: str, kind: str, passed: list[bool]) -> None:
        good = sum(passed)
        lines.append(f"| {name} | {kind} | {len(passed)} | {good} | {len(passed) - good} |")

    for name in STORMS:
        results = [row for (storm, _), row in rows.items() if storm == name]
        for kind in sorted({row[0] for row in results}):
            add(name, kind, [row[1] for row in results if row[0] == kind])
        if results:
            add(f"**{name}**", "all", [row[1] for row in results])
    failures = [
        f"{name} {number} ({kind}): {seen}"
        for (name, number), (kind, passed, seen) in sorted(rows.items())
        if not passed
    ]
    return lines, failures


def main(arguments: list[str]) -> int:
    """Run the storms in `jobs` processes; print the table."""
    everything = "--all" in arguments
    options = dict(word.partition("=")[::2] for word in arguments if word != "--all")
    names = (*STORMS, "others", "jobs", "seed", "record", "part")
    if strange := sorted(set(options) - set(names)):
        text = f"unknown: {', '.join(strange)}; there are --all, {', '.join(names)}"
        print(text, file=sys.stderr)
        return 2
    jobs = int(options.get("jobs", "1"))
    seed = int(options.get("seed", "0"))
    counts: dict[str, int] = {}
    for name, (_, usual, many) in STORMS.items():
        default = options.get("others", many if everything else usual)
        counts[name] = int(options.get(name, default))
    with tempfile.TemporaryDirectory() as folder:
        default_record = "storm.jsonl" if everything else f"{folder}/storm.jsonl"
        record = Path(options.get("record", default_record)).absolute()
        if "part" in options:
            part(counts, seed, record, int(options["part"]), jobs)
            return 0
        words = [f"{name}={count}" for name, count in counts.items()]
        words += [f"seed={seed}", f"record={record}", f"jobs={jobs}"]
        state = {"XDG_STATE_HOME": f"{folder}/state", "MPLCONFIGDIR": f"{folder}/matplotlib"}
        environment = {**os.environ, **state, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        parts = [
            subprocess.Popen([sys.executable, __file__, *words, f"part={mine}"], env=environment)
            for mine in range(jobs)
        ]
        codes = [process.wait() for process in parts]
        rows = {
            (name, number): result
            for (name, number), result in recorded(record, seed).items()
            if number < counts.get(name, 0)
        }
    lines, failures = table(rows)
    print("\n".join([*lines, *failures]))
    return int(bool(failures or any(codes) or len(rows) < sum(counts.values())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
