"""Recorded steps on a GPU (`train.cuda_graph=true`): the losses of eager steps, and the time of both.

    python scripts/gpu_graph.py --out benchmarks/NAME-graph.json [--dry-run]

Each recipe trains a small model eagerly and with `train.cuda_graph=true`. They run on what `backend=auto` chooses,
Transformer Engine where it is installed, but for delayed scaling, which runs on torch's products.
Learning rates are float32 numbers
and algorithms deterministic, so all losses must be equal in every bit to those of the same run without graphs. Exit
code 0: they are; 1: they are not, or a run failed; 3: there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu_runs
import gpu_stand_ins
import torch

from fp4train.run.step_graph import WARM_UP

OPTIONS = (
    "model=llama_30m",
    "train.steps=40",
    "train.batch_size=8",
    "train.microbatch=4",
    "train.seq_len=256",
    "eval.every=15",
    "eval.batches=2",
    "checkpoint.every=0",
    "phases=none",
    "track=jsonl",
    "optim.lr=0.0009765625",
    "schedule=constant",
    "schedule.warmup=0",
    "train.deterministic=true",
)
CASES: dict[str, tuple[str, ...]] = {
    **{recipe: (f"recipe={recipe}",) for recipe in ("bf16", "mxfp8", "fp8_current", "nvfp4")},
    "fp8_delayed": ("recipe=fp8_delayed", "backend=native"),
    "nvfp4, recomputed": ("recipe=nvfp4", "model.recompute=true"),
}
"""Name → keys of the runs."""
DRY = ("nvfp4", "fp8_delayed")
"""The cases of a dry run."""


def train(
    folder: Path, name: str, keys: tuple[str, ...], graph: str, extra: list[str], *, dry: bool
) -> gpu_runs.Lines | str:
    """The lines of a run's steps, or what it said when it failed."""
    words = [*OPTIONS, *keys, f"train.cuda_graph={graph}", *extra]
    with ExitStack() as stack:
        if dry:
            words = stack.enter_context(gpu_stand_ins.instead_of([*words, "train.steps=6"]))
        return gpu_runs.train(folder / f"{name.replace(', ', '-')}-{graph}", words, dry=dry)


def differing(eager: gpu_runs.Lines, graph: gpu_runs.Lines) -> list[int]:
    """The steps whose numbers differ."""
    keys = ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe")
    return [
        a["step"]
        for a, b in zip(eager, graph, strict=True)
        if any(a.get(k) != b.get(k) for k in keys)
    ]


def compare(folder: Path, name: str, extra: list[str], *, dry: bool = False) -> dict[str, Any]:
    """A row: losses and milliseconds per step of the runs of a case."""
    runs = {
        graph: train(folder, name, CASES[name], graph, extra, dry=dry)
        for graph in ("false", "true")
    }
    failed = {graph: run[-500:] for graph, run in runs.items() if isinstance(run, str)}
    found: dict[str, Any] = {"failed": failed} if failed else {}
    lines = {graph: run for graph, run in runs.items() if not isinstance(run, str)}
    for graph, run in lines.items():
        settled = [line for line in run[WARM_UP + 2 :] if line.get("perf/tokens_per_s")]
        tokens = run[0]["train/tokens"]
        found[f"{graph} ms"] = statistics.median(
            1000 * tokens / line["perf/tokens_per_s"] for line in settled
        )
    differ = {
        graph: differing(lines["false"], run) for graph, run in lines.items() if "false" in lines
    }
    found["first difference at step"] = {graph: min(each) for graph, each in differ.items() if each}
    return {"name": name, "ok": not failed and not found["first difference at step"], **found}


def main() -> int:
    """Compare all cases; results are written as they come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument(
        "options", nargs="*", help="more settings of the runs, such as backend=emulate"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="some cases of a tiny model on a CPU, with a recorder",
    )
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu_graph: torch sees no GPU, and CUDA graphs record what one does")
        return 3
    names = list(DRY if given.dry_run else CASES)
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if not results.has(name):
                results.add(compare(Path(folder), name, given.options, dry=given.dry_run))
    return results.code


if __name__ == "__main__":
    sys.exit(main())
