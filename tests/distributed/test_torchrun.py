"""The command that documentation shows, under torchrun itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

Ranks = Any

DIES_ONCE = """
import os, sys, time
import fp4train.train as loop
from fp4train.cli import main
original = loop.train_step
def train_step(run, recipe):
    if run.step == 3 and not os.path.exists("died"):
        run.saver.wait(); run.world.wait()
        if not run.world.lead:
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        time.sleep(60)
    return original(run, recipe)
loop.train_step = train_step
main(sys.argv[1:])
"""
"""The second rank is killed in its first life, when the checkpoint of step 2 is whole."""


ONE_MACHINE = ("--nproc-per-node", "2", "--standalone")


def torchrun(
    ranks: Ranks, *arguments: str, machine: tuple[str, ...] = ONE_MACHINE
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", *machine, *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return subprocess.Popen(
        command,
        cwd=ranks.folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.long
def test_a_killed_rank_and_a_restart_end_in_the_same_bits(ranks: Ranks) -> None:
    (ranks.folder / "dies_once.py").write_text(DIES_ONCE)
    options = ranks.tiny("run.name=restarted", "checkpoint.every=2")
    job = torchrun(ranks, "--max-restarts", "1", "dies_once.py", *options)
    said = job.communicate(timeout=240)[1]
    assert job.returncode == 0 and "going on from step" in said, said
    ranks.same(ranks.reference("train.microbatch=2"), "restarted")


@pytest.mark.long
def test_the_machine_that_is_left_of_an_elastic_range_goes_on_with_the_whole_batch(
    ranks: Ranks,
) -> None:
    """Its one rank has the microbatches of both; with them come the same bits."""
    with_its_agent = "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)"
    program = DIES_ONCE.replace("os.kill(os.getpid(), 9)", with_its_agent)
    (ranks.folder / "dies_once.py").write_text(program)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    machine = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-id", "two", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "3"),
        *("--rdzv-conf", "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3"),
    )
    options = ranks.tiny("run.name=restarted", "checkpoint.every=2", "train.microbatch=2")
    jobs = [torchrun(ranks, "dies_once.py", *options, machine=machine)]
    time.sleep(3)  # the first one keeps the store
    jobs.append(torchrun(ranks, "dies_once.py", *options, machine=machine))
    said = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, -9], said
    assert "2 ranks (2 shards)" in said[0] and "going on from step 2" in said[0]
    ranks.same(ranks.reference("train.microbatch=2"), "restarted")


@pytest.mark.long
def test_torchruns_of_two_machines_meet_again_after_a_killed_rank(ranks: Ranks) -> None:
    """Only the one whose rank was killed counts a restart."""
    (ranks.folder / "dies_once.py").write_text(DIES_ONCE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    machine = (
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "two", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "1"),
    )
    options = ranks.tiny("run.name=restarted", "checkpoint.every=2", "parallel.timeout=40")
    jobs = [torchrun(ranks, "dies_once.py", *options, machine=machine) for _ in range(2)]
    said = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert "going on from step" in "".join(said)
    ranks.same(ranks.reference("train.microbatch=2"), "restarted")


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
