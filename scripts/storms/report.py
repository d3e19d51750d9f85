"""The table of storms, on the screen and in benchmarks/reliability.md."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "benchmarks/reliability.md"
TITLE = "# Fault tests\n"
HEADER = ["| storm | of | trials | passed | failed |", "|---|---|---|---|---|"]
Rows = Mapping[tuple[str, int], tuple[str, bool, str]]
"""(storm, number) → (kind, passed, seen) of the trials that are done."""


def table(rows: Rows, storms: Collection[str]) -> tuple[list[str], list[str]]:
    """A Markdown table of the results, in the order of `storms`, and a line for each trial that
    failed.
    """
    trials = Counter((name, kind) for (name, _), (kind, *_) in rows.items())
    failed = Counter((name, kind) for (name, _), (kind, passed, _) in rows.items() if not passed)
    lines = list(HEADER)
    for name in storms:
        kinds = sorted(kind for storm, kind in trials if storm == name)
        for kind in kinds:
            count = trials[name, kind]
            bad = failed[name, kind]
            lines.append(f"| {name} | {kind} | {count} | {count - bad} | {bad} |")
        if kinds:
            count = sum(trials[name, kind] for kind in kinds)
            bad = sum(failed[name, kind] for kind in kinds)
            lines.append(f"| **{name}** | all | {count} | {count - bad} | {bad} |")
    failures = [
        f"{name} {number} ({kind}): {seen}"
        for (name, number), (kind, passed, seen) in sorted(rows.items())
        if not passed
    ]
    return lines, failures


def of_storm(line: str) -> str:
    """The storm of a row of a table, or of a line about a trial that failed."""
    if line.startswith("|"):
        return line.split("|")[1].strip(" *")
    return line.removeprefix("- ").partition(" ")[0]


def without(report: str, names: Collection[str]) -> str:
    """The report without the rows of some storms, and without the text about a table that has no
    row left. Texts that follow a table, up to a heading or the next table, are about the next one.
    """
    kept: list[str] = []
    pending: list[str] = []
    has_rows = False
    for block in report.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if lines[: len(HEADER)] == HEADER:
            rows = [line for line in lines[len(HEADER) :] if of_storm(line) not in names]
            has_rows = bool(rows)
            if rows:
                kept += [*pending, "\n".join([*HEADER, *rows])]
            pending = []
        elif block.startswith("- "):
            failures = [line for line in lines if of_storm(line) not in names]
            if has_rows and failures:
                kept.append("\n".join(failures))
        else:
            pending.append(block)
    return "\n\n".join([*kept, *pending])


def write_report(rows: Rows, storms: Collection[str], words: str) -> None:
    """Put the table of these trials at the beginning of benchmarks/reliability.md. Tables of earlier
    trials lose the rows of the same storms, and keep the others with what is said about them.
    """
    import torch

    lines, failures = table(rows, storms)
    title, *sections = REPORT.read_text().split("\n## ")
    names = {name for name, _ in rows}
    earlier = without(title.removeprefix(TITLE), names)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    model = next(
        (t for t in Path("/proc/cpuinfo").read_text().splitlines() if t.startswith("model name")),
        ": a CPU",
    )
    head = f"""`python scripts/storm.py {words}` on commit {commit.strip()}, torch {torch.__version__},
Python {platform.python_version()}, {os.cpu_count()} cores of {model.partition(": ")[2]}: {len(rows):,} trials,
{len(failures)} failed. Each row counts the trials of one kind; `scripts/storm.py` says what a trial does and when it
passes."""
    parts = [head, "\n".join(lines), "\n".join(f"- {line}" for line in failures), earlier]
    first = TITLE + "\n" + "\n\n".join(part for part in parts if part)
    REPORT.write_text("\n\n## ".join([first, *(part.strip("\n") for part in sections)]) + "\n")
