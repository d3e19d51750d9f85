"""Runs without a fault, with all audits: none of them must find one.

    python scripts/audit_clean.py 400 [--first N] [--record FILE] [--page FILE]     # an hour on one core

Each recipe of recipes/ in turn, in eight ways: by emulation, by the reference and, where torch
multiplies its codes on a CPU, by its native products; dense and of experts; on one rank and on two,
which divide the weights, have copies of them, cut the layers (tensor parallelism), or join the
amaxes of their tokens. A run has so many steps that each layer of its model is audited. The models
have two blocks under the default policy, which keeps the last one in BF16, or one block whose layers
are all quantised. After each run its result is a line of the record, and a later call makes the runs
that the record lacks, or has with other options. At the end the page is written. `--first` leaves
out the runs before that number.
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

from fp4train.text import counted

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in ROOT.glob("recipes/*.yaml"))
NATIVE = ("fp8_current", "fp8_delayed", "fp8_row")
"""Recipes whose codes torch multiplies on a CPU, slowly: dense models take them alone."""
UNCUT = ("averis", "chon", "flux_residual", "tetrajet_v2_outliers")
"""Recipes that take means, residuals or channels of a whole layer: tensor parallelism refuses
them.
"""
ONE_RANK = "1"
SHARDS = ("parallel.dp_shard=2",)
REPLICAS = ("parallel.dp_replicate=2",)
TENSOR = ("parallel.tp=2", "model.kv_heads=2")
JOINED = ("parallel.amax=data",)
MESHES = {
    ONE_RANK: (),
    "2, shards": SHARDS,
    "2, replicas": REPLICAS,
    "2, tensor": TENSOR,
    "2, tensor, whole tokens": (*TENSOR, "parallel.sp=false"),
    "2, shards, joined amaxes": (*SHARDS, *JOINED),
    "2, replicas, joined amaxes": (*REPLICAS, *JOINED),
}
"""Options by number of ranks and what these share."""
NOTES = "\n## Notes\n"
"""Heading of what a reader adds to a page."""
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
        mesh: a key of `MESHES`.
    """

    number: int
    recipe: str
    backend: str
    model: str
    blocks: str
    mesh: str = ONE_RANK

    @property
    def ranks(self) -> int:
        return int(self.mesh.partition(",")[0])

    @property
    def options(self) -> tuple[str, ...]:
        words = [f"recipe={self.recipe}", f"backend={self.backend}", f"run.seed={self.number}"]
        words += MESHES[self.mesh]
        if self.backend == "native":
            words.append("train.seq_len=32")
        return (*SMALL, *MODELS[self.model, self.blocks], *AUDITS, *words)


def planned_runs(count: int, first: int = 0) -> Iterator[CleanRun]:
    """`count` runs from number `first` on: eight turns through all recipes, and again."""
    for number in range(first, first + count):
        turn, place = divmod(number, len(RECIPES))
        recipe = RECIPES[place]
        ways = _ways(recipe, place, turn // 8)
        backend, model, blocks, mesh = ways[turn % 8]
        yield CleanRun(
            number=number, recipe=recipe, backend=backend, model=model, blocks=blocks, mesh=mesh
        )


def _ways(recipe: str, place: int, cycle: int) -> tuple[tuple[str, str, str, str], ...]:
    """(Backend, model, blocks, mesh) of the eight runs of a recipe.

    Args:
        place: its place among the recipes: neighbours have other meshes, blocks or models.
        cycle: how often all recipes have had their turns.
    """
    odd = (place + cycle) % 2
    second = place // 2 % 2
    mesh = ("2, shards", "2, replicas")[odd]
    tensor = ("2, tensor", "2, tensor, whole tokens")[odd]
    joined = ("2, replicas, joined amaxes", "2, shards, joined amaxes")[odd]
    blocks = (ALL, DEFAULT)[second]
    backend = ("emulate", "reference")[second]
    if recipe in NATIVE:
        one_block = ("native", "dense", ALL, ONE_RANK)
        two_ranks = ("native", "dense", ALL, mesh)
    else:
        one_block = ("reference", "dense", ALL, ONE_RANK)
        two_ranks = ("emulate", "dense", blocks, mesh)
    if recipe in UNCUT:
        cut = ("emulate", "dense", ALL, ("2, replicas", "2, shards")[odd])
    else:
        cut = ("emulate", ("dense", "experts")[second], ALL, tensor)
    return (
        ("emulate", "dense", DEFAULT, ONE_RANK),
        ("reference", "experts", ALL, ONE_RANK),
        (backend, "experts", ALL, mesh),
        one_block,
        ("emulate", "experts", DEFAULT, ONE_RANK),
        two_ranks,
        cut,
        (backend, "dense", blocks, joined),
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


def make_runs(count: int, record: Path, first: int = 0) -> dict[CleanRun, dict[str, Any]]:
    """The results of `count` runs from number `first` on, of which those are made that the record
    lacks.
    """
    made = made_runs(record)
    planned = list(planned_runs(count, first))
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


def page(results: dict[CleanRun, dict[str, Any]], notes: str = "") -> str:
    """The page of all results, which ends with the notes of a reader."""
    rows: dict[tuple[str, str, str, str], Counter[str]] = {}
    for clean, result in results.items():
        key = (clean.backend, clean.model, clean.blocks, clean.mesh)
        row = rows.setdefault(key, Counter())
        row["runs"] += 1
        row["audits"] += result["audits"]
        row["partial"] += bool(result["uncovered"])
        row["faulty"] += bool(result["faults"])
        row["failed"] += is_wrong(result) and not result["faults"]
    total: Counter[str] = sum(rows.values(), Counter())
    recipes = len({clean.recipe for clean in results})
    commits = Counter(result["commit"] for result in results.values())
    code_of = [f"{commit} ({counted(runs, 'run')})" for commit, runs in commits.items()]
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
    for (backend, model, blocks, mesh), row in sorted(rows.items()):
        counts = (row[key] for key in ("runs", "audits", "partial", "faulty", "failed"))
        numbers = " | ".join(map(str, counts))
        lines.append(f"| {backend} | {model}: {blocks} | {mesh} | {numbers} |")
    lines += ["", *layers_left_out(results), *parts_left_out(results)]
    for clean, result in results.items():
        if is_wrong(result):
            sentences = [*result["faults"], *result["failed"], f"exit code {result['code']}"]
            lines += ["", f"`{' '.join(clean.options)}`: {'; '.join(sentences)}"]
    first = min(clean.number for clean in results)
    command = f"python scripts/audit_clean.py {len(results)}"
    if first:
        command += f" --first {first}"
    lines += [
        "",
        f"`{command}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {sum(row['seconds'] for row in results.values()) / 60:.0f} "
        f"minutes, code of {' and '.join(code_of)}.",
    ]
    return "\n".join(lines) + "\n" + notes


def notes_of(file: Path) -> str:
    """What a reader wrote at the end of a page, with its heading; empty where there is nothing."""
    text = file.read_text() if file.exists() else ""
    _, heading, notes = text.partition(NOTES)
    return heading + notes


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
        runs = counted(recipes.total(), "run")
        yield f"- not compared, {backend}: {reason} ({runs}; {', '.join(sorted(recipes))})"


def script(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int, help="number of runs; eight times the recipes have all")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--record", type=Path, default=ROOT / "runs" / "audit_clean.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "audit_clean.md")
    options = parser.parse_args(arguments)
    if options.runs < 1 or options.first < 0:
        parser.error("runs: at least 1, from number 0 on")
    torch.set_num_threads(1)
    # paths as they are before runs go into folders of their own
    results = make_runs(options.runs, options.record.resolve(), options.first)
    file = options.page.resolve()
    file.write_text(page(results, notes_of(file)))
    return int(any(map(is_wrong, results.values())))


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
