"""Short training runs on a GPU, and what must be equal between them:

    python scripts/gpu_training.py --out NAME-training.json [CHECK …] [--patience SECONDS] [--dry-run]

    RECIPE          two steps, whose losses are numbers
    compiled        the same with `train.compile=true`
    liger           liger's kernels beside torch's: losses to 1e-2, norms of gradients to 0.1
    recorded, …     forty steps with `train.cuda_graph=true` and without: equal in every bit, and the time of both
    recomputed, …   with `model.recompute=true` and without: equal in every bit, and the time of both; with torch's
                    norms: liger's round the sum that a norm reads where a block begins otherwise
    resumed, …      steps 5 to 8 again from the checkpoint between: weights and moments, too, equal in every bit

A check is named by itself, as `recorded`, or with its recipe, as `"resumed, nvfp4"`; without names all run. Each run is
a process of its own, since a crash of one must not end the others, and one that takes longer than `--patience` is
ended; as many checks as half of the cores run at once, but those that are timed. Rows are written as they come. Exit
code 0: all are well; 1: one is not; 3: there is no GPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_results
import gpu_stand_ins

SMALL = (
    "model=llama_30m",
    "train.batch_size=8",
    "train.microbatch=4",
    "train.seq_len=256",
    "eval.every=0",
    "checkpoint.every=0",
    "phases=none",
    "track=jsonl",
)
SHORT = (*SMALL, "train.steps=2")
EXACT = (*SMALL, "train.deterministic=true", "train.steps=8")
SAVED = ("checkpoint.every=4", "checkpoint.keep=9")
RECORDED = (
    "train.steps=40",
    "eval.every=15",
    "eval.batches=2",
    "optim.lr=0.0009765625",
    "schedule=constant",
    "schedule.warmup=0",
)
"""Learning rates are float32 numbers, as those of a graph are."""
RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed", "fp8_row", "fp8_block")
COMPARED = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed")
KEYS = ("train/loss", "train/grad_norm", "val/loss", "val/loss_recipe")
TINY = (
    "device=cpu",
    "model=llama_tiny",
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=32",
    "train.batch_size=2",
    "train.microbatch=1",
    "train.seq_len=16",
    "policy=all",
)
"""Keys of the runs of a dry run; they come last and win."""
DRY = ("nvfp4", "compiled", "liger", "recorded, nvfp4", "recomputed, nvfp4", "resumed, nvfp4")
"""The checks of a dry run: one of each kind."""

Lines = list[dict[str, Any]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Trainer:
    """Runs of `fp4train` in a folder.

    Args:
        patience: seconds after which a run is ended.
        dry: whether they are tiny, in this process, on a CPU.
    """

    folder: Path
    patience: float
    dry: bool

    def train(self, name: str, words: Sequence[str]) -> Lines:
        """The lines of the steps that a run logged.

        Raises:
            ValueError: it failed, with what it said last.
        """
        run = self.folder / name
        words = [*words, f"run.dir={run}", f"run.name={run.name}"]
        if self.dry:
            gpu_stand_ins.fp4train([*words, *self._tiny(words)])
        else:
            command = [sys.executable, "-m", "fp4train", *words]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=self.patience)
            if ended.returncode:
                raise ValueError((ended.stderr.strip().splitlines() or ["no message"])[-1][-500:])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "train/loss" in line]

    def _tiny(self, words: Sequence[str]) -> Sequence[str]:
        if any(word.startswith("resume=") for word in words):
            return ()
        text = self.folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog in 4 bits " * 400)
        steps = ["train.steps=6"] * ("train.steps=40" in words)
        return (*TINY, *steps, "data=text", f"data.path={text}", f"data.cache_dir={self.folder}/c")

    def bits(self, name: str, step: int) -> str:
        """A checksum of the weights and moments after a step."""
        saved = self.folder / name / "checkpoints" / f"step_{step:08}" / "tensors.safetensors"
        return hashlib.sha256(saved.read_bytes()).hexdigest()


def finite(words: Sequence[str], trainer: Trainer, name: str) -> Row:
    losses = [line["train/loss"] for line in trainer.train(name, [*SHORT, *words])]
    return {"ok": bool(losses) and all(map(math.isfinite, losses)), "losses": losses}


def liger(trainer: Trainer, name: str) -> Row:
    torchs, ligers = (
        trainer.train(f"{name}-{kernels}", [*SHORT, "recipe=bf16", f"train.kernels={kernels}"])[0]
        for kernels in ("torch", "liger")
    )
    apart = {key: abs(ligers[key] / torchs[key] - 1) for key in KEYS[:2]}
    return {"ok": apart[KEYS[0]] < 1e-2 and apart[KEYS[1]] < 0.1, "apart": apart}


def equal(words: Sequence[str], switch: str, trainer: Trainer, name: str) -> Row:
    """Two runs, one of them with a key that must not change their bits."""
    words = [*EXACT, *words]
    without = trainer.train(f"{name}-without", [*words, f"{switch}=false"])
    switched = trainer.train(name, [*words, f"{switch}=true"])
    differs = first_difference(without, switched)
    times = {"without ms": step_ms(without), "ms": step_ms(switched)}
    return {"ok": differs is None, "first difference": differs, **times}


def resumed(recipe: str, trainer: Trainer, name: str) -> Row:
    straight = trainer.train(name, [*EXACT, *SAVED, f"recipe={recipe}"])
    words = [f"resume={trainer.folder / name}", "resume_step=4"]
    again = trainer.train(f"{name}-again", words)
    differs = first_difference(straight[4:], again[-4:])
    same_state = trainer.bits(name, 8) == trainer.bits(f"{name}-again", 8)
    ok = same_state and differs is None
    return {"ok": ok, "first difference": differs, "weights and moments equal": same_state}


def first_difference(lines: Lines, others: Lines) -> int | None:
    """The first step at which two runs differ."""
    if [line["step"] for line in lines] != [line["step"] for line in others]:
        return -1
    pairs = zip(lines, others, strict=True)
    return next((a["step"] for a, b in pairs if any(a.get(k) != b.get(k) for k in KEYS)), None)


def step_ms(lines: Lines) -> float | None:
    """Median time of a step, from its speed; the first ones load kernels and record."""
    speeds = [line["perf/tokens_per_s"] for line in lines[5:] if line.get("perf/tokens_per_s")]
    return 1000 * lines[0]["train/tokens"] / statistics.median(speeds) if speeds else None


def checks() -> dict[str, Callable[[Trainer, str], Row]]:
    """All of them by name, what is worth most first."""
    by_name: dict[str, Callable[[Trainer, str], Row]] = {}
    for recipe in RECIPES:
        by_name[recipe] = partial(finite, [f"recipe={recipe}"])
    by_name["compiled"] = partial(finite, ["recipe=bf16", "train.compile=true"])
    by_name["liger"] = liger
    for recipe in COMPARED:
        words = [f"recipe={recipe}"]
        by_name[f"resumed, {recipe}"] = partial(resumed, recipe)
        torchs = [*words, "train.kernels=torch"]
        by_name[f"recomputed, {recipe}"] = partial(equal, torchs, "model.recompute")
        # TE's delayed scaling cannot be recorded
        backend = ["backend=native"] * (recipe == "fp8_delayed")
        recorded = [*words, *RECORDED, *backend]
        by_name[f"recorded, {recipe}"] = partial(equal, recorded, "train.cuda_graph")
    return by_name


def main(words: list[str] | None = None) -> int:
    parser = gpu_results.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="CHECK")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds of a run")
    options, results = gpu_results.begin(parser, words)
    by_name = checks()
    asked = options.names or (DRY if options.dry_run else by_name)
    names = [name for name in by_name if name in asked or name.partition(",")[0] in asked]
    if options.dry_run:
        names = [name for name in names if name in DRY]
    if not names:
        parser.error(f"no check {' '.join(asked)}: they are {', '.join(by_name)}")
    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(Path(place), options.patience, options.dry_run)

        def measure(name: str) -> None:
            results.measure(name, partial(by_name[name], trainer, name.replace(", ", "-")))

        timed = [name for name in names if options.dry_run or "reco" in name]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            list(pool.map(measure, [name for name in names if name not in timed]))
        for name in timed:
            measure(name)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
