"""Runs without a fault, with all audits: none of them must find one.

    python scripts/audit_clean.py RUNS [FIRST]       # 300 runs take half an hour on one core

All recipes of recipes/ in turn, on both backends that run on a CPU, dense and of experts; every
fourth run is of two ranks. FIRST begins at another one, so that parts make a whole. Says each run on
standard error, and prints a row of a table.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from audit_runs import DENSE, EXPERTS, SMALL, run

RECIPES = sorted(path.stem for path in Path(__file__).parents[1].glob("recipes/*.yaml"))


@dataclass(frozen=True)
class CleanRun:
    """A run without a fault.

    Args:
        ranks: 2: a run of two processes, each with a part of the weights, or a copy of them.
    """

    recipe: str
    backend: str
    model: tuple[str, ...]
    seed: int
    ranks: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        mesh: tuple[str, ...] = ()
        if self.ranks > 1:
            mesh = (("parallel.dp_shard=2",), ("parallel.dp_replicate=2",))[self.seed // 4 % 2]
        audits = ("audit.every=1", "audit.sums=1", "audit.repeat=3", "train.steps=6")
        words = (f"recipe={self.recipe}", f"backend={self.backend}", f"run.seed={self.seed}")
        return (*SMALL, *self.model, *words, *audits, *mesh)


def planned_clean_runs() -> Iterator[CleanRun]:
    """Endlessly: all recipes of recipes/ in turn; backends, dense models and experts alternate from
    run to run, so that four turns have all of a recipe; every fourth run is of two ranks.
    """
    for number in itertools.count():
        turn, place = divmod(number, len(RECIPES))
        yield CleanRun(
            recipe=RECIPES[place],
            backend=("emulate", "reference")[(place // 2 + turn // 2) % 2],
            model=(DENSE, EXPERTS)[(place + turn) % 2],
            seed=number,
            ranks=2 if number % 4 == 3 else 1,
        )


def clean_runs(count: int, first: int = 0) -> tuple[int, int, int]:
    """(Runs, those with a fault, those whose audits failed or that ended otherwise than with 0)."""
    faulty = failed = 0
    for clean in itertools.islice(planned_clean_runs(), first, first + count):
        began = time.perf_counter()
        finding = run(clean.options, ranks=clean.ranks)
        faulty += bool(finding.sentences)
        failed += bool(finding.failed) or finding.code != 0
        words = (clean.seed, clean.recipe, clean.backend, clean.model[0], f"{clean.ranks} ranks")
        seconds = f"{time.perf_counter() - began:.0f} s"
        print(*words, seconds, finding, file=sys.stderr, flush=True)
    return count, faulty, failed


def script(arguments: list[str]) -> int:
    count, first = (*map(int, arguments), 0)[:2]
    torch.set_num_threads(1)
    _, faulty, failed = clean_runs(count, first)
    print(
        "| clean runs | with a fault | with an audit that failed, or another end |\n|---|---|---|"
    )
    print(f"| {first} to {first + count - 1} | {faulty} | {failed} |")
    return int(bool(faulty or failed))


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
