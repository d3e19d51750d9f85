"""The command that documentation shows, under torchrun itself."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

Ranks = Any

KILLS = int(os.environ.get("FP4TRAIN_KILLS", "3"))
"""Random moments at which a rank is killed; docs/scale.md says how many were tried by hand."""

DIES_ONCE = """
import os, sys
import fp4train.train as loop
from fp4train.cli import main
original = loop.train_step
def train_step(run, recipe):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.step == 4 and not run.world.lead:
        os.kill(os.getpid(), 9)
    return original(run, recipe)
loop.train_step = train_step
main(sys.argv[1:])
"""


def torchrun(ranks: Ranks, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, cwd=ranks.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.long
def test_a_killed_rank_and_a_restart_end_in_the_same_bits(ranks: Ranks) -> None:
    (ranks.folder / "dies_once.py").write_text(DIES_ONCE)
    options = ranks.tiny("run.name=restarted", "checkpoint.every=2")
    job = torchrun(ranks, "--max-restarts", "1", "dies_once.py", *options)
    said = job.communicate(timeout=240)[1]
    assert job.returncode == 0 and "going on from step" in said, said
    ranks.train(1, "one", "train.microbatch=2")
    ranks.same("one", "restarted")


@pytest.mark.long
def test_sigterm_to_torchrun_saves_and_ends(ranks: Ranks) -> None:
    options = ranks.tiny("run.name=a", "train.steps=5000", "eval.every=0", "phases=none")
    job = torchrun(ranks, "-m", "fp4train", *options)
    metrics = ranks.folder / "runs/a/metrics.jsonl"
    ranks.until(lambda: metrics.exists() and metrics.read_text().count("train/loss") > 2)
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=120)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    (saved,) = (ranks.folder / "runs/a/checkpoints").glob("step_*")
    assert saved.name == f"step_{steps[-1]:08d}"


def workers(agent: int) -> list[int]:
    """The ranks that a torchrun has started, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(each.split("=", 1) for each in (path / "environ").read_text().split("\0") if "=" in each)
        except (OSError, ValueError):  # it has ended
            continue
        if parent == agent and "RANK" in variables:
            found[int(variables["RANK"])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_killed_at_any_moment_costs_no_bit(ranks: Ranks, seed: int) -> None:
    """While it starts, trains, evaluates, writes a checkpoint or ends: torchrun starts the ranks again."""
    draw = random.Random(seed)
    long = ("train.steps=30", "eval.every=10", "phases=none")
    options = ranks.tiny("run.name=killed", "checkpoint.every=3", *long)
    job = torchrun(ranks, "--max-restarts", "1", "--monitor-interval", "0.1", "-m", "fp4train", *options)
    metrics, step = ranks.folder / "runs/killed/metrics.jsonl", draw.randrange(30)
    ranks.until(lambda: len(workers(job.pid)) == 2)
    ranks.until(lambda: not step or (metrics.exists() and metrics.read_text().count("train/loss") >= step))
    time.sleep(draw.uniform(0, 0.2 if step else 8))
    victims = workers(job.pid)
    if victims:  # else the run was faster than the draw
        os.kill(victims[draw.randrange(len(victims))], signal.SIGKILL)
    said = job.communicate(timeout=240)[1]
    assert job.returncode == 0, said
    ranks.train(1, "one", "train.microbatch=2", *long)
    ranks.same("one", "killed")
