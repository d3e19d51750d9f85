"""Small runs with audits, and what these said of them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4train.cli import main

DENSE = ("model.layers=2",)
EXPERTS = ("model=moe_tiny", "model.layers=2")
TAIL = 2000
"""Characters of what a run printed last that are kept."""
SMALL = (
    "train.steps=18",
    "train.batch_size=4",
    "train.microbatch=2",
    "train.seq_len=64",
    "eval.every=0",
    "eval.batches=1",
    "checkpoint.every=6",
    "checkpoint.keep=9",
    "track=jsonl",
    "phases=none",
    "schedule=constant",
    "schedule.warmup=0",
    "data=text",
)


MAIN = """
import sys
from fp4train.cli import main
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Finding:
    """What the audits of a run said: faults as a tracker has them, and failed checkpoints.

    Args:
        audits: number of audits of a layer.
        layers: names of the layers that were audited.
        uncovered: part of an audit that could not be compared, with the reason → the layers.
        printed: the last `TAIL` characters that the run printed.
    """

    faults: list[dict[str, Any]]
    refused: list[str]
    failed: list[str]
    code: int
    audits: int
    layers: list[str]
    uncovered: dict[str, list[str]]
    printed: str

    @property
    def sentences(self) -> list[str]:
        """Each fault in words."""
        told = [
            f"{fault['layer']} {fault['gemm']} {fault['operand']}: {fault['what']}: "
            f"{', '.join(fault['hypotheses'])}"
            for fault in self.faults
        ]
        return [*told, *self.refused]


def run(
    options: Sequence[str],
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ranks: int = 1,
    patch: str = "",
) -> Finding:
    """One run in a folder of its own; of several ranks, in as many processes.

    Args:
        plant: makes the context in which a run of one rank has a fault.
        patch: program that plants one in each of several ranks, before the run begins.
    """
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
            words = ["run.name=a", "data.path=text.txt", *options]
            if ranks > 1:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                program = ["-m", "fp4train"]
                if patch:
                    Path("planted.py").write_text(f"{patch}\n{MAIN}")
                    program = ["planted.py"]
                command += [f"--nproc-per-node={ranks}", *program, *words]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                ended = subprocess.run(
                    command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    check=False,
                )
                return finding_of(Path("runs/a/metrics.jsonl"), ended.returncode, ended.stdout)
            shown = io.StringIO()
            code = 0
            with plant(), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                try:
                    main(words)
                except SystemExit as ended:
                    code = int(ended.code or 0)
            return finding_of(Path("runs/a/metrics.jsonl"), code, shown.getvalue())
        finally:
            os.chdir(here)
            logging.disable(logging.NOTSET)


def finding_of(metrics: Path, code: int, printed: str = "") -> Finding:
    """What the audits of a run said, from its metrics and what it printed."""
    lines = []
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    audits = [line for line in lines if line.get("event") == "audit"]
    uncovered: dict[str, dict[str, None]] = {}
    for audit in audits:
        for reason in audit["uncovered"]:
            uncovered.setdefault(reason, {})[audit["layer"]] = None
    return Finding(
        faults=[line for line in lines if line.get("event") == "audit fault"],
        refused=[line["reason"] for line in lines if line.get("event") == "checkpoint failed"],
        failed=[line["reason"] for line in lines if line.get("event") == "audit failed"],
        code=code,
        audits=len(audits),
        layers=sorted({audit["layer"] for audit in audits}),
        uncovered={reason: list(layers) for reason, layers in uncovered.items()},
        printed=printed[-TAIL:],
    )
