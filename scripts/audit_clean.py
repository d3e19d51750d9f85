"""Runs without a fault, with all audits: none of them must find one.

    python scripts/audit_clean.py 300 [--record FILE] [--page FILE]      # half an hour on one core

Each recipe of recipes/ in turn, in six ways: by emulation, by the reference and, where torch
multiplies its codes on a CPU, by its native products; dense and of experts; on one rank and on two,
which divide the weights or have copies of them. A run has so many steps that each layer of its model
is audited. The models have two blocks under the default policy, which keeps the last one in BF16, or
one block whose layers are all quantised. After each run its result is a line of the record, and a
later call makes the runs that the record lacks, or has with other options. At the end the page is
written.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
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
MESHES = ("parallel.dp_shard=2", "parallel.dp_replicate=2")
AUDITS = ("audit.every=1", "audit.sums=1", "audit.repeat=3")
DEFAULT = "two blocks, default policy"
ALL = "one block, policy=all"
ONE_BLOCK = ("model.layers=1", "policy=all")
MODELS = {
    ("dense", DEFAULT): (*DENSE, "train.steps=15"),
    ("dense", ALL): (*ONE_BLOCK, "train.steps=8"),
    ("experts", DEFAULT): (*EXPERTS, "train.steps=17"),
    ("experts", ALL): ("model=moe_tiny", "model.dense=0", *ONE_BLOCK, "train.steps=10"),
}
"""Options by model and blocks: a step more than the model has layers, since one layer comes twice."""


@dataclass(frozen=True, kw_only=True)
class CleanRun:
    """A run without a fault.

    Args:
        number: its place among all runs, which is its seed.
        model, blocks: a key of `MODELS`.
        mesh: how two ranks share the weights; empty: the run has one rank.
    """

    number: int
    recipe: str
    backend: str
    model: str
    blocks: str
    mesh: str = ""

    @property
    def ranks(self) -> int:
        return 2 if self.mesh else 1

    @property
    def options(self) -> tuple[str, ...]:
        words = [f"recipe={self.recipe}", f"backend={self.backend}", f"run.seed={self.number}"]
        if self.mesh:
            words.append(self.mesh)
        if self.backend == "native":
            words.append("train.seq_len=32")
        return (*SMALL, *MODELS[self.model, self.blocks], *AUDITS, *words)


def planned_runs(count: int) -> Iterator[CleanRun]:
    """The first `count` runs: six turns through all recipes, and again."""
    for number in range(count):
        turn, place = divmod(number, len(RECIPES))
        recipe = RECIPES[place]
        is_native = recipe in NATIVE
        mesh = MESHES[(place + turn // 6) % 2]
        blocks_of_two_ranks = (ALL, DEFAULT)[place // 2 % 2]
        backend_of_experts = ("emulate", "reference")[place // 2 % 2]
        ways = (
            ("emulate", "dense", DEFAULT, ""),
            ("reference", "experts", ALL, ""),
            (backend_of_experts, "experts", ALL, mesh),
            ("native" if is_native else "reference", "dense", ALL, ""),
            ("emulate", "experts", DEFAULT, ""),
            ("native", "dense", ALL, mesh)
            if is_native
            else ("emulate", "dense", blocks_of_two_ranks, mesh),
        )
        backend, model, blocks, mesh = ways[turn % 6]
        yield CleanRun(
            number=number, recipe=recipe, backend=backend, model=model, blocks=blocks, mesh=mesh
        )


def made_runs(record: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """The results of a record by the options of their runs. A line that was cut off, or that has
    no options, is no result.
    """
    results = {}
    lines = record.read_text().splitlines() if record.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "options" in row:
            results[tuple(row["options"])] = row
    return results


def make_run(clean: CleanRun) -> dict[str, Any]:
    """Make a run; its result."""
    began = time.perf_counter()
    finding = run(clean.options, ranks=clean.ranks)
    result = {
        "audits": finding.audits,
        "layers": finding.layers,
        "uncovered": finding.uncovered,
        "faults": finding.sentences,
        "failed": finding.failed,
        "code": finding.code,
        "seconds": round(time.perf_counter() - began, 1),
        "commit": _commit(),
    }
    if is_wrong(result):
        result["printed"] = finding.printed
    return result


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def make_runs(count: int, record: Path) -> dict[CleanRun, dict[str, Any]]:
    """The results of the first `count` runs, of which those are made that the record lacks."""
    made = made_runs(record)
    planned = list(planned_runs(count))
    results = {clean: made[clean.options] for clean in planned if clean.options in made}
    missing = [clean for clean in planned if clean not in results]
    record.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with record.open("a") as lines:
        lines.write("\n" if missing and record.stat().st_size else "")  # after one that was cut off
        for index, clean in enumerate(missing, start=1):
            result = results[clean] = make_run(clean)
            row = {"run": asdict(clean), "options": clean.options, **result}
            lines.write(json.dumps(row) + "\n")
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
        for sentence in (*result["faults"], *result["failed"], result["printed"]):
            print(f"  {sentence}", file=sys.stderr)


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether a run was not clean, or no audit looked at it."""
    failed = result["failed"] or result["code"] != 0 or not result["audits"]
    return bool(result["faults"] or failed)


def page(results: dict[CleanRun, dict[str, Any]]) -> str:
    """The page of all results."""
    rows: dict[tuple[str, str, str, int], Counter[str]] = {}
    for clean, result in results.items():
        key = (clean.backend, clean.model, clean.blocks, clean.ranks)
        row = rows.setdefault(key, Counter())
        row["runs"] += 1
        row["audits"] += result["audits"]
        row["partial"] += bool(result["uncovered"])
        row["faulty"] += bool(result["faults"])
        row["failed"] += is_wrong(result) and not result["faults"]
    total: Counter[str] = sum(rows.values(), Counter())
    recipes = len({clean.recipe for clean in results})
    commits = dict.fromkeys(result["commit"] for result in results.values())
    lines = [
        "# Audited runs without a fault",
        "",
        f"{total['runs']} runs of 8 to 17 steps, of {recipes} recipes: in every step a layer is "
        "audited and the state is summed, and the steps 4, 7, 10, … are computed twice. In "
        f"{total['faulty']} of them an audit found a fault; in {total['failed']} an audit failed, "
        f"or the run ended otherwise; in {total['partial']} an audit could not compare all.",
        "",
        "| backend | model | ranks | runs | audits of a layer | partly | with a fault | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (backend, model, blocks, ranks), row in sorted(rows.items()):
        counts = (row[key] for key in ("runs", "audits", "partial", "faulty", "failed"))
        numbers = " | ".join(map(str, counts))
        lines.append(f"| {backend} | {model}: {blocks} | {ranks} | {numbers} |")
    lines += ["", *layers_left_out(results), *parts_left_out(results)]
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


def layers_left_out(results: dict[CleanRun, dict[str, Any]]) -> Iterator[str]:
    """Lines about the layers of each model that no run of a recipe audited."""
    seen: dict[tuple[str, str], dict[str, set[str]]] = {}
    for clean, result in results.items():
        recipes = seen.setdefault((clean.model, clean.blocks), {})
        names = (re.sub(r"\.\d+$", "", layer) for layer in result["layers"])  # not the expert's
        recipes.setdefault(clean.recipe, set()).update(names)
    for (model, blocks), recipes in seen.items():
        layers = set().union(*recipes.values())
        left_out = [
            f"{recipe}: {', '.join(sorted(layers - audited))}"
            for recipe, audited in recipes.items()
            if layers - audited
        ]
        told = f"all of {len(layers)} layers were audited with each of {len(recipes)} recipes"
        if left_out:
            told = f"of {len(layers)} layers these were not audited: {'; '.join(left_out)}"
        yield f"- {model}, {blocks}: {told}"


def parts_left_out(results: dict[CleanRun, dict[str, Any]]) -> Iterator[str]:
    """Lines about the parts of audits that could not be compared, by backend and reason."""
    parts: dict[tuple[str, str], Counter[str]] = {}
    for clean, result in results.items():
        for reason in result["uncovered"]:
            parts.setdefault((clean.backend, reason), Counter())[clean.recipe] += 1
    if not parts:
        yield "- no audit left anything out"
    for (backend, reason), recipes in sorted(parts.items()):
        runs = f"{recipes.total()} run{'' if recipes.total() == 1 else 's'}"
        yield f"- not compared, {backend}: {reason} ({runs}; {', '.join(sorted(recipes))})"


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
