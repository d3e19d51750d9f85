"""Runs without a fault, with all audits: none of them must find one.

    python scripts/audit_clean.py 300 [--record FILE] [--page FILE]      # half an hour on one core

Each recipe of recipes/ in turn, in six ways: by emulation, by the reference and, where torch
multiplies its codes on a CPU, by its native products; dense and of experts; on one rank and on two,
which divide the weights or have copies of them. After each run its result is a line of the record,
and a later call makes the runs that the record lacks. At the end the page is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from audit_runs import DENSE, EXPERTS, SMALL, run

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in ROOT.glob("recipes/*.yaml"))
NATIVE = ("fp8_current", "fp8_delayed", "fp8_row")
"""Recipes whose codes torch multiplies on a CPU, slowly: dense models take them alone."""
MODELS = {"dense": DENSE, "experts": EXPERTS}
MESHES = ("parallel.dp_shard=2", "parallel.dp_replicate=2")
AUDITS = ("audit.every=1", "audit.sums=1", "audit.repeat=3", "train.steps=6")


@dataclass(frozen=True, kw_only=True)
class CleanRun:
    """A run without a fault.

    Args:
        number: its place among all runs, which is its seed.
        model: a key of `MODELS`.
        mesh: how two ranks share the weights; empty: the run has one rank.
    """

    number: int
    recipe: str
    backend: str
    model: str
    mesh: str = ""

    @property
    def ranks(self) -> int:
        return 2 if self.mesh else 1

    @property
    def options(self) -> tuple[str, ...]:
        words = [f"recipe={self.recipe}", f"backend={self.backend}", f"run.seed={self.number}"]
        if self.mesh:
            words.append(self.mesh)
        return (*SMALL, *MODELS[self.model], *AUDITS, *words)


def planned_runs(count: int) -> Iterator[CleanRun]:
    """The first `count` runs: six turns through all recipes, and again."""
    for number in range(count):
        turn, place = divmod(number, len(RECIPES))
        recipe = RECIPES[place]
        is_native = recipe in NATIVE
        mesh = MESHES[(place + turn // 6) % 2]
        ways: tuple[tuple[str, str, str], ...] = (
            ("emulate", "dense", ""),
            ("reference", "experts", ""),
            (("emulate", "reference")[place // 2 % 2], "experts", mesh),
            ("native" if is_native else "reference", "dense", ""),
            ("emulate", "experts", ""),
            ("native" if is_native else "emulate", "dense", mesh),
        )
        backend, model, mesh = ways[turn % 6]
        yield CleanRun(number=number, recipe=recipe, backend=backend, model=model, mesh=mesh)


def made_runs(record: Path) -> dict[CleanRun, dict[str, Any]]:
    """The results of a record by their run. A line that was cut off is no result."""
    results = {}
    lines = record.read_text().splitlines() if record.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[CleanRun(**row.pop("run"))] = row
    return results


def make_run(clean: CleanRun) -> dict[str, Any]:
    """Make a run; its result."""
    began = time.perf_counter()
    finding = run(clean.options, ranks=clean.ranks)
    return {
        "audits": finding.audits,
        "faults": finding.sentences,
        "failed": finding.failed,
        "code": finding.code,
        "seconds": round(time.perf_counter() - began, 1),
        "commit": _commit(),
    }


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def make_runs(count: int, record: Path) -> dict[CleanRun, dict[str, Any]]:
    """The results of the first `count` runs, of which those are made that the record lacks."""
    made = made_runs(record)
    results = {clean: made[clean] for clean in planned_runs(count) if clean in made}
    missing = [clean for clean in planned_runs(count) if clean not in results]
    record.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with record.open("a") as lines:
        lines.write("\n" if missing and record.stat().st_size else "")  # after one that was cut off
        for index, clean in enumerate(missing, start=1):
            result = results[clean] = make_run(clean)
            lines.write(json.dumps({"run": asdict(clean), **result}) + "\n")
            lines.flush()
            minutes = (time.perf_counter() - began) / 60
            _tell(clean, result)
            print(
                f"{len(results)} of {count} runs, {sum(map(is_wrong, results.values()))} of them "
                f"not clean, about {minutes / index * (len(missing) - index):.0f} minutes left",
                file=sys.stderr,
                flush=True,
            )
    return results


def _tell(clean: CleanRun, result: dict[str, Any]) -> None:
    words = (clean.number, clean.recipe, clean.backend, clean.model, clean.mesh)
    print(*words, f"{result['seconds']} s, {result['audits']} audits", file=sys.stderr)
    if is_wrong(result):
        print(f"  exit code {result['code']}", file=sys.stderr)
        for sentence in (*result["faults"], *result["failed"]):
            print(f"  {sentence}", file=sys.stderr)


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether a run was not clean, or no audit looked at it."""
    failed = result["failed"] or result["code"] != 0 or not result["audits"]
    return bool(result["faults"] or failed)


def page(results: dict[CleanRun, dict[str, Any]]) -> str:
    """The page of all results."""
    rows: dict[tuple[str, str, int], Counter[str]] = {}
    for clean, result in results.items():
        row = rows.setdefault((clean.backend, clean.model, clean.ranks), Counter())
        row["runs"] += 1
        row["audits"] += result["audits"]
        row["faulty"] += bool(result["faults"])
        row["failed"] += is_wrong(result) and not result["faults"]
    total: Counter[str] = sum(rows.values(), Counter())
    recipes = len({clean.recipe for clean in results})
    commits = dict.fromkeys(result["commit"] for result in results.values())
    lines = [
        "# Audited runs without a fault",
        "",
        f"{total['runs']} runs of 6 steps, of {recipes} recipes: every step is audited and summed, "
        f"each third one repeated. In {total['faulty']} of them an audit found a fault; in "
        f"{total['failed']} an audit failed, or the run ended otherwise.",
        "",
        "| backend | model | ranks | runs | audits of a layer | with a fault | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for (backend, model, ranks), row in sorted(rows.items()):
        numbers = f"{row['runs']} | {row['audits']} | {row['faulty']} | {row['failed']}"
        lines.append(f"| {backend} | {model} | {ranks} | {numbers} |")
    for clean, result in results.items():
        if is_wrong(result):
            sentences = [*result["faults"], *result["failed"], f"exit code {result['code']}"]
            lines += ["", f"`{' '.join(clean.options)}`: {'; '.join(sentences)}"]
    lines += [
        "",
        f"`python scripts/audit_clean.py {len(results)}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {sum(row['seconds'] for row in results.values()) / 60:.0f} "
        f"minutes, code of {', '.join(commits)}.",
    ]
    return "\n".join(lines) + "\n"


def script(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int, help="number of runs; six times the recipes have all")
    parser.add_argument("--record", type=Path, default=ROOT / "runs" / "audit_clean.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "audit_clean.md")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("runs: at least 1")
    torch.set_num_threads(1)
    # paths as they are before runs go into folders of their own
    results = make_runs(options.runs, options.record.resolve())
    options.page.resolve().write_text(page(results))
    return int(any(map(is_wrong, results.values())))


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
