"""What a checkpoint costs the training loop, against one that the loop waits for.

    python scripts/checkpoint_cost.py [model=llama_125m] [checkpoints=3] [out=TABLE.md] [also key=value of a run]

Trains a few steps of a run in a temporary folder, as `train.train` does them. The time of a checkpoint to the loop is
what `Saver.begin` takes; beside it the same checkpoint, written while the loop waits, and the processor time that the
thread takes for that, which a run on a CPU shares with its steps. Prints a Markdown table; `between=12` steps lie
between two checkpoints.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from fp4train.config.composition import composed
from fp4train.run.build import build
from fp4train.run.command import Command
from fp4train.run.find import new_origin
from fp4train.run.host import keep_freed_memory
from fp4train.run.record import directory as run_directory
from fp4train.run.run import Run
from fp4train.train import enter_stretch, train_step


def prepare(folder: Path, given: dict[str, str], between: int) -> Run:
    """A run of small batches: the state is the model's, whatever the batch."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog in 4 bits " * 2000)
    options = {
        "model": "llama_125m",
        "data": "text",
        "data.path": str(text),
        "data.cache_dir": str(folder / "cache"),
        "run.name": "cost",
        "run.dir": str(folder / "run"),
        "train.steps": "1000",
        "train.batch_size": "1",
        "train.seq_len": "64",
        "recipe": "bf16",
        "track": "jsonl",
        "phases": "none",
        "checkpoint.every": str(between),
        "checkpoint.keep": "1",
    }
    words = [f"{key}={value}" for key, value in (options | given).items()]
    (made,) = composed(words)
    return build(new_origin(Command.of(made.cfg)))


def step(run: Run) -> None:
    """One step as the loop does it."""
    train_step(run, enter_stretch(run, None).recipe)
    run.step += 1
    run.mid_update = False
    run.saver.prove(run.step - 1)


def main(arguments: list[str]) -> int:
    """Measure; print a table."""
    given = dict(a.partition("=")[::2] for a in arguments)
    count = int(given.pop("checkpoints", "3"))
    between = int(given.pop("between", "12"))
    out = given.pop("out", None)
    table: list[str] = []

    def say(line: str) -> None:
        """Print a line, and write all so far: what ends the process early leaves them."""
        table.append(line)
        print(line, flush=True)
        if out is not None:
            Path(out).write_text("\n".join(table) + "\n", encoding="utf-8")

    keep_freed_memory()
    with (
        tempfile.TemporaryDirectory(dir=given.pop("folder", None)) as place,
        run_directory.locked(Path(place) / "run"),
    ):
        run = prepare(Path(place), given, between)
        step(run)
        say(f"{run.description}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
        say(
            "| checkpoint | written while the loop waits | of that, processor time | cost to "
            "the loop | ratio |"
        )
        say("|---|---|---|---|---|")
        for number in range(1, count + 1):
            while run.step % between:
                step(run)
            began = time.perf_counter()
            run.saver.begin(proven=True)
            begun = time.perf_counter() - began
            for _ in range(between - 1):
                step(run)
            run.saver.wait()
            began = time.perf_counter()
            processor = time.process_time()
            run.saver.begin(proven=True)
            run.saver.wait()
            waited = time.perf_counter() - began
            processor = time.process_time() - processor
            if not all(outcome.written for outcome in run.saver.outcomes()):
                raise SystemExit("a checkpoint could not be written")
            say(
                f"| {number} | {waited:.2f} s | {processor:.2f} s | {begun:.3f} s | "
                f"{begun / waited:.3f} |"
            )
            step(run)
        run.saver.close()
        run.record.tracker.finish(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
