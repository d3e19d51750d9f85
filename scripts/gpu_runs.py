"""Runs of `fp4train` for the scripts for GPU machines: a process each or, in a dry run, in this one at tiny sizes."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    "eval.batches=1",
    "policy=all",
    "eval.every=0",
)
"""Keys of a dry run's runs; they come last and win, but for the model, if that is tiny."""

Lines = list[dict[str, Any]]


def train(run: Path, words: list[str], *, dry: bool) -> Lines | str:
    """The lines of the steps that a run logged, or what it said when it failed.

    Args:
        run: its directory.
        words: of the command.
    """
    text = run.with_suffix(".txt")
    where = [f"run.dir={run}", f"run.name={run.name}", "track=jsonl"]
    if dry:
        if not any(word.startswith("resume=") for word in words):
            text.parent.mkdir(parents=True, exist_ok=True)
            text.write_text("the quick brown fox jumps over the lazy dog in 4 bits " * 400)
            models = [
                word for word in words if word.startswith("model=") and word.endswith("_tiny")
            ]
            words = [
                *words,
                *TINY,
                *models,
                "data=text",
                f"data.path={text}",
                f"data.cache_dir={run.parent / 'cache'}",
            ]
        if said := in_this_process([*words, *where]):
            return said
    else:
        command = [sys.executable, "-m", "fp4train", *words, *where]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return steps(run)


def in_this_process(words: list[str]) -> str | None:
    """Why `fp4train words` failed, or None."""
    from unittest.mock import patch

    from fp4train.cli import main

    try:
        with patch(
            "fp4train.lab.analysis.curves.draw_curves", lambda run: Path(run) / "curves.png"
        ):
            main(words)
    except SystemExit as ended:
        return None if not ended.code else f"exit code {ended.code}"
    return None


def options(description: str | None, dry: str) -> argparse.ArgumentParser:
    """The options of a script of checks: `--out FILE`, `--dry-run`, and `--only NAME` of the
    processes of `alone`.

    Args:
        dry: what a dry run is.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser


def alone(script: str, name: str, patience: float | None = None) -> dict[str, Any]:
    """The row that `script --only name` prints in a process of its own; one that is not `ok` where
    it prints none.

    Args:
        patience: seconds after which the process is ended; None: it is not.
    """
    began = time.perf_counter()
    failed = {"name": name, "ok": False}
    command = [sys.executable, script, "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return failed | {"note": f"hangs: ended after {patience:.0f} s", "seconds": patience}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        note = f"the process ended with {done.returncode}: {last[-300:]}"
        return failed | {"note": note, "seconds": round(time.perf_counter() - began, 1)}
    return found


def steps(run: Path) -> Lines:
    """The lines of metrics that belong to training steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def bits(run: Path, step: int) -> str:
    """A checksum of the weights and moments after `step`."""
    return hashlib.sha256(
        (run / "checkpoints" / f"step_{step:08}" / "tensors.safetensors").read_bytes()
    ).hexdigest()


class Results:
    """Rows of a JSON file, written anew after each: what ends a process early leaves what was found
    before.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path = path
        self.machine = machine
        self.rows: list[dict[str, Any]] = []
        if path.exists():  # an earlier call of the same part: what worked then is not done again
            found = json.loads(path.read_text())
            if found["machine"] == machine:
                self.rows = [row for row in found["rows"] if row.get("ok")]

    def has(self, name: str) -> bool:
        return any(row["name"] == name for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """A row with its name and whether it is `ok`, in the place of one of that name."""
        self.rows = [*(old for old in self.rows if old["name"] != row["name"]), row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"machine": self.machine, "rows": self.rows}, indent=1, ensure_ascii=False
        )
        beside = self.path.with_suffix(".part")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(self.path)  # whoever packs results finds the file before or after
        print(json.dumps(row, ensure_ascii=False), flush=True)

    @property
    def code(self) -> int:
        """The exit code of the script."""
        return 0 if self.rows and all(row["ok"] for row in self.rows) else 1


def machine() -> dict[str, Any]:
    """GPU, driver and versions."""
    import torch

    from fp4train.hardware import driver_version

    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "transformer_engine"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if not torch.cuda.is_available():
        return found | {"gpu": None}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return found | {
        "gpu": torch.cuda.get_device_name(),
        "capability": capability,
        "driver": driver_version(),
    }


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
