"""Recorded steps on a GPU (`train.cuda_graph`): the same losses as eager steps, and the time of both.

    python scripts/gpu_graph.py --out benchmarks/NAME-graph.json

Each recipe trains a small model twice, with and without a graph. Learning rates are float32 numbers and algorithms
deterministic, so all losses must be equal in every bit. Exit code 1: they are not, or a run failed; 3: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
    run = folder / f"{recipe}-{graph}"
    command = [sys.executable, "-m", "fp4train", *OPTIONS, f"recipe={recipe}", f"train.cuda_graph={str(graph).lower()}"]
    done = subprocess.run([*command, f"run.dir={run}", *extra], capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def compare(folder: Path, recipe: str, extra: list[str]) -> dict[str, Any]:
    """Losses and milliseconds per step of both runs of `recipe`."""
    eager, graph = (train(folder, recipe, on, extra) for on in (False, True))
    if isinstance(eager, str) or isinstance(graph, str):
        said = {name: run[-500:] for name, run in (("eager", eager), ("graph", graph)) if isinstance(run, str)}
        return {"equal": False, **said}
    keys = ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe")
    differ = [a["step"] for a, b in zip(eager, graph, strict=True) if any(a.get(k) != b.get(k) for k in keys)]
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
    given = parser.parse_args()
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
