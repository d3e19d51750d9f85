"""Recorded steps on a GPU (`train.cuda_graph`): the same losses as eager steps, and the time of both.

    python scripts/gpu_graph.py --out benchmarks/NAME-graph.json

Each recipe trains a small model twice, with and without a graph. Learning rates are float32 numbers and algorithms
deterministic, so all losses must be equal in every bit. Exit code 1: they are not, or a run failed; 3: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_runs
import gpu_stand_ins
import torch

from fp4train.run.step_graph import WARM_UP

RECIPES = ("bf16", "mxfp8", "fp8_current", "fp8_delayed", "nvfp4")
OPTIONS = (
    *("model=llama_30m", "train.steps=40", "train.batch_size=8", "train.microbatch=4", "train.seq_len=256"),
    *("eval.every=15", "eval.batches=2", "checkpoint.every=0", "phases=none", "track=jsonl"),
    *("optim.lr=0.0009765625", "schedule=constant", "schedule.warmup=0", "train.deterministic=true"),
)


def train(folder: Path, recipe: str, graph: bool, extra: list[str]) -> list[dict[str, Any]] | str:
    """The lines of a run's steps, or what it said when it failed."""
    words = [*OPTIONS, f"recipe={recipe}", f"train.cuda_graph={str(graph).lower()}", *extra]
    return gpu_runs.train(folder / f"{recipe}-{graph}", words, dry=False)


def dry_run() -> int:
    """One recipe on a CPU."""
    words = [*OPTIONS, "recipe=nvfp4", "train.steps=6"]
    with tempfile.TemporaryDirectory() as place:
        with gpu_stand_ins.graphs(recorded=False):
            eager = gpu_runs.train(Path(place) / "eager", words, dry=True)
        with gpu_stand_ins.graphs() as recorders:
            graph = gpu_runs.train(Path(place) / "graph", words, dry=True)
    if isinstance(eager, str) or isinstance(graph, str):
        print("eager:", eager, "recorded:", graph)
        return 1
    equal = not differing(eager, graph)
    print(
        f"{recorders[0].replays} replays, whose losses are {'equal' if equal else 'NOT equal'} to those of eager steps"
    )
    return 0 if equal else 1


def differing(eager: gpu_runs.Lines, graph: gpu_runs.Lines) -> list[int]:
    """The steps whose numbers differ."""
    keys = ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe")
    return [a["step"] for a, b in zip(eager, graph, strict=True) if any(a.get(k) != b.get(k) for k in keys)]


def compare(folder: Path, recipe: str, extra: list[str]) -> dict[str, Any]:
    """Losses and milliseconds per step of both runs of `recipe`."""
    eager, graph = (train(folder, recipe, on, extra) for on in (False, True))
    if isinstance(eager, str) or isinstance(graph, str):
        said = {name: run[-500:] for name, run in (("eager", eager), ("graph", graph)) if isinstance(run, str)}
        return {"equal": False, **said}
    differ = differing(eager, graph)
    times = {}
    for name, lines in (("eager", eager), ("graph", graph)):
        settled = [line for line in lines[WARM_UP + 2 :] if line.get("perf/tokens_per_s")]
        tokens = lines[0]["train/tokens"]
        times[f"{name} ms"] = statistics.median(1000 * tokens / line["perf/tokens_per_s"] for line in settled)
    return {"equal": not differ, "first difference at step": min(differ, default=None), **times}


def main() -> int:
    """Compare all recipes; results are written as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("options", nargs="*", help="more settings of the runs, such as backend=emulate")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on a CPU, with a recorder")
    given = parser.parse_args()
    if given.dry_run:
        return dry_run()
    if not torch.cuda.is_available():
        print("gpu_graph: torch sees no GPU, and CUDA graphs record what one does")
        return 3
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "recipes": {}}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            found = compare(Path(folder), recipe, given.options)
            results["recipes"][recipe] = found
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            print(recipe, found, flush=True)
    return 0 if all(each["equal"] for each in results["recipes"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
