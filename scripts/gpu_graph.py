"""Recorded steps and recorded blocks on a GPU (`train.cuda_graph`): the losses of eager steps, and the time of all.

    python scripts/gpu_graph.py --out benchmarks/NAME-graph.json

Each recipe trains a small model eagerly, with `train.cuda_graph=true` and with `block`; one of them with recomputed and
with compiled blocks, too. Learning rates are float32 numbers and algorithms deterministic, so all losses must be equal
in every bit to those of the same run without graphs. Exit code 1: they are not, or a run failed; 3: there is no GPU.
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


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{recipe: ((f"recipe={recipe}",), ("true", "block")) for recipe in RECIPES},
    "nvfp4, recomputed": (("recipe=nvfp4", "model.recompute=true"), ("true", "block")),
    "nvfp4, compiled": (("recipe=nvfp4", "train.compile=true"), ("block",)),
}
"""Name → keys of the runs, and what records them."""
REFUSED = {("fp8_delayed", "block")}
"""Delayed scaling in recorded blocks."""


def train(folder: Path, name: str, keys: tuple[str, ...], graph: str, extra: list[str]) -> list[dict[str, Any]] | str:
    """The lines of a run's steps, or what it said when it failed."""
    words = [*OPTIONS, *keys, f"train.cuda_graph={graph}", *extra]
    return gpu_runs.train(folder / f"{name.replace(', ', '-')}-{graph}", words, dry=False)


def dry_run() -> int:
    """One recipe on a CPU."""
    words = [*OPTIONS, "recipe=nvfp4", "train.steps=6"]
    with tempfile.TemporaryDirectory() as place:
        with gpu_stand_ins.graphs(recorded=False):
            eager = gpu_runs.train(Path(place) / "eager", words, dry=True)
        for recorded in (True, "block"):
            with gpu_stand_ins.graphs(recorded=recorded):
                graph = gpu_runs.train(Path(place) / f"graph-{recorded}", words, dry=True)
            if isinstance(eager, str) or isinstance(graph, str):
                print("eager:", eager, "recorded:", graph)
                return 1
            equal = not differing(eager, graph)
            what = "steps" if recorded is True else "blocks"
            print(f"recorded {what}: losses are {'equal' if equal else 'NOT equal'} to those of eager steps")
            if not equal:
                return 1
    return 0


def differing(eager: gpu_runs.Lines, graph: gpu_runs.Lines) -> list[int]:
    """The steps whose numbers differ."""
    keys = ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe")
    return [a["step"] for a, b in zip(eager, graph, strict=True) if any(a.get(k) != b.get(k) for k in keys)]


def compare(folder: Path, name: str, extra: list[str]) -> dict[str, Any]:
    """Losses and milliseconds per step of the runs of a case."""
    keys, graphs = CASES[name]
    runs = {
        graph: train(folder, name, keys, graph, extra) for graph in ("false", *graphs) if (name, graph) not in REFUSED
    }
    failed = {graph: run[-500:] for graph, run in runs.items() if isinstance(run, str)}
    found: dict[str, Any] = {"failed": failed} if failed else {}
    lines = {graph: run for graph, run in runs.items() if not isinstance(run, str)}
    for graph, run in lines.items():
        settled = [line for line in run[WARM_UP + 2 :] if line.get("perf/tokens_per_s")]
        tokens = run[0]["train/tokens"]
        found[f"{graph} ms"] = statistics.median(1000 * tokens / line["perf/tokens_per_s"] for line in settled)
    differ = {graph: differing(lines["false"], run) for graph, run in lines.items() if "false" in lines}
    found["first difference at step"] = {graph: min(each) for graph, each in differ.items() if each}
    return {"equal": not failed and not found["first difference at step"], **found}


def main() -> int:
    """Compare all cases; results are written as they come."""
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
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            found = compare(Path(folder), name, given.options)
            results["cases"][name] = found
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, found, flush=True)
    return 0 if all(each["equal"] for each in results["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
