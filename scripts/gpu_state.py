"""Runs that are resumed, and runs that recompute their blocks, against straight ones, to the bit:

    python scripts/gpu_state.py --out NAME-state.json [--recipes NAME …] [--dry-run]

All are deterministic (`train.deterministic=true`). Per recipe

    resume       8 steps, and the last 4 of them again from the checkpoint between: losses, norms, weights and moments
    recompute    8 steps with `model.recompute=true` and without it, and the time of both; with torch's norms
                 (`train.kernels=torch`): liger's round the sum that a norm reads where a block begins otherwise

Rows are written as they come. Exit code 0: all are equal; 1: one is not; 3: there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_runs
import torch

RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed")
OPTIONS = (
    "model=llama_30m",
    "train.steps=8",
    "train.batch_size=8",
    "train.microbatch=4",
    "train.seq_len=256",
    "phases=none",
    "eval.every=0",
    "checkpoint.every=4",
    "checkpoint.keep=9",
    "train.deterministic=true",
)
KEYS = ("train/loss", "train/grad_norm")


def resumed(folder: Path, recipe: str, straight: gpu_runs.Lines, *, dry: bool) -> dict[str, Any]:
    """The second half of a run again, from its checkpoint."""
    name = f"{recipe}, resume"
    run = folder / recipe
    words = [f"resume={run}", "resume_step=4"]
    lines = gpu_runs.train(folder / f"{recipe}-again", words, dry=dry)
    if isinstance(lines, str):
        return {"name": name, "ok": False, "note": lines[-500:]}
    differ = different(straight[4:], lines[-4:])
    equal = gpu_runs.bits(run, 8) == gpu_runs.bits(folder / f"{recipe}-again", 8)
    return {
        "name": name,
        "ok": equal and not differ,
        "first difference": differ,
        "weights and moments equal": equal,
    }


def recomputed(folder: Path, recipe: str, *, dry: bool) -> dict[str, Any]:
    """A run whose blocks are computed again in backward."""
    name = f"{recipe}, recompute"
    words = [*OPTIONS, f"recipe={recipe}", "train.kernels=torch"]
    straight = gpu_runs.train(folder / f"{recipe}-torch", words, dry=dry)
    words = [*words, "model.recompute=true"]
    lines = gpu_runs.train(folder / f"{recipe}-recompute", words, dry=dry)
    for said in (straight, lines):
        if isinstance(said, str):
            return {"name": name, "ok": False, "note": said[-500:]}
    assert not isinstance(straight, str) and not isinstance(lines, str)
    differ = different(straight, lines)
    times = {
        kind: milliseconds(each)
        for kind, each in (("straight ms", straight), ("recomputed ms", lines))
    }
    return {"name": name, "ok": differ is None, "first difference": differ, **times}


def different(straight: gpu_runs.Lines, lines: gpu_runs.Lines) -> int | None:
    """The first step at which two runs differ."""
    if [each["step"] for each in straight] != [each["step"] for each in lines]:
        return -1
    pairs = zip(straight, lines, strict=True)
    return next(
        (a["step"] for a, b in pairs if any(a.get(key) != b.get(key) for key in KEYS)), None
    )


def milliseconds(lines: gpu_runs.Lines) -> float | None:
    """Median time of a step, from its speed; the first ones load kernels."""
    speeds = [line["perf/tokens_per_s"] for line in lines[2:] if line.get("perf/tokens_per_s")]
    return 1000 * lines[0]["train/tokens"] / statistics.median(speeds) if speeds else None


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="all by default"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="one recipe of a tiny model on a CPU"
    )
    given = parser.parse_args(words)
    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu_state: torch sees no GPU")
        return 3
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for recipe in given.recipes[-1:] if given.dry_run else given.recipes:
            if results.has(f"{recipe}, resume") and results.has(f"{recipe}, recompute"):
                continue
            straight = gpu_runs.train(
                folder / recipe, [*OPTIONS, f"recipe={recipe}"], dry=given.dry_run
            )
            if isinstance(straight, str):
                results.add({"name": f"{recipe}, straight", "ok": False, "note": straight[-500:]})
                continue
            results.add(resumed(folder, recipe, straight, dry=given.dry_run))
            results.add(recomputed(folder, recipe, dry=given.dry_run))
    return results.code


if __name__ == "__main__":
    sys.exit(main())
