"""scripts/slurm.sbatch with an `srun` and a `scontrol` of our own: two nodes with a task each, or
one with two, on this machine.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import losses, wait_for
from torch.distributed.run import get_args_parser

from fp4train import checkpoint
from fp4train.parallel.launch import ProcessRank, find_place

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm.sbatch"
Ranks = Any

SRUN = '''#!{python}
"""Starts a step's tasks as Slurm does: their variables, the signals of `scancel`, one bad exit ends all."""
import os, subprocess, sys, time

given = [word for word in sys.argv[1:] if word.startswith(("--kill", "--wait", "--ntasks", "--cpus"))]
options, command = dict(word.split("=") for word in given), sys.argv[1 + len(given):]
assert options["--kill-on-bad-exit"] == "0"
nodes = int(os.environ["SLURM_NNODES"])
per_node = int(options.get("--ntasks-per-node", os.environ["SLURM_NTASKS_PER_NODE"]))
tasks = []
for rank in range(nodes * per_node):
    own = dict(
        SLURM_STEP_ID="0", SLURM_PROCID=rank, SLURM_LOCALID=rank % per_node, SLURM_NODEID=rank // per_node,
        SLURM_NTASKS=nodes * per_node, SLURM_STEP_NUM_TASKS=nodes * per_node,
        SLURM_STEP_NODELIST=os.environ["SLURM_JOB_NODELIST"], SLURM_STEP_TASKS_PER_NODE=f"{{per_node}}(x{{nodes}})",
        SLURM_CPUS_PER_TASK=os.environ["SRUN_CPUS_PER_TASK"],
    )
    tasks.append(subprocess.Popen(command, env={{**os.environ, **{{k: str(v) for k, v in own.items()}}}}))
with open("tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
ended, first = {{}}, 0.0
while len(ended) < len(tasks):
    for rank, task in enumerate(tasks):
        code = task.poll()
        if code is not None and rank not in ended:
            ended[rank] = 128 - code if code < 0 else code
            first = time.monotonic() if len(ended) == 1 else first
    if ended and time.monotonic() > first + float(options["--wait"]):
        for other in tasks:
            other.kill()
    time.sleep(0.05)
sys.exit(max(ended.values()))
'''
SCONTROL = (
    '#!/bin/sh\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> scontrol.log; fi\n'
)


def header(name: str) -> str:
    """The value of an #SBATCH line."""
    found = re.search(rf"^#SBATCH --{name}=(\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert found is not None, name
    return found[1]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def sbatch(tmp_path: Path) -> Start:
    """Runs the script's body as a job of two tasks on so many `nodes`; `restarts`: how often it was
    requeued.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    squeue = f"#!/bin/sh\ncat {tmp_path}/left\n"
    (tmp_path / "left").write_text("12:04:59\n")
    for name, source in (
        ("srun", SRUN.format(python=sys.executable)),
        ("scontrol", SCONTROL),
        ("squeue", squeue),
    ):
        (programs / name).write_text(source)
        (programs / name).chmod(0o755)
    job = str(os.getpid() % 9_000)

    def start(
        *arguments: str, nodes: int = 1, restarts: int = 0, **variables: str
    ) -> "subprocess.Popen[str]":
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM_", "MASTER_"))
            },
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": job,
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS_PER_NODE": str(2 // nodes),
            "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_JOB_NODELIST": "127.0.0.[1-2]" if nodes == 2 else "127.0.0.1",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **variables,
        }
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.Popen(
            command,
            cwd="/",
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


HELD_AT_8 = '''#!{python}
"""`python -m fp4train`, whose steps after the eighth wait until the job has had its signal."""
import os, sys, time
import fp4train.train as loop
from fp4train.cli import main
original = loop.train_step
def train_step(run, recipe):
    while run.step >= 8 and not os.path.exists("signalled"):
        time.sleep(0.02)
    return original(run, recipe)
loop.train_step = train_step
assert sys.argv[1:3] == ["-m", "fp4train"]
main(sys.argv[3:])
'''


def ended(job: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        out, err = job.communicate(timeout=240)
    finally:
        job.kill()
    return job.returncode, out + err


def test_a_task_has_its_place_among_all_and_on_its_node() -> None:
    """The second of the second node's two."""
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    assert find_place(variables) == ProcessRank(
        rank=3, size=4, local_rank=1, local_size=2, address="gpu07", port=20_017
    )


@pytest.mark.long
def test_a_job_of_two_nodes_saves_before_its_limit_and_comes_back_to_the_same_bits(
    ranks: Ranks, sbatch: Start, tmp_path: Path
) -> None:
    """As those of two ranks of one machine."""
    given = ("train.steps=30", "eval.every=0", "policy.last=0")
    options = ranks.tiny("device=cpu", *given)
    held = tmp_path / "bin/held"
    held.write_text(HELD_AT_8.format(python=sys.executable))
    held.chmod(0o755)
    job = sbatch(*options, "run.name=slurm", nodes=2, PYTHON=str(held))
    run = tmp_path / "runs/slurm"
    metrics = run / "metrics.jsonl"
    wait_for(
        lambda: (
            job.poll() is not None
            or (metrics.exists() and metrics.read_text().count("train/loss") > 2)
        )
    )
    number = getattr(signal, f"SIG{header('signal').partition('@')[0]}")
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), number)
    (tmp_path / "signalled").touch()
    code, said = ended(job)
    assert code == 0 and "goes back into the queue" in said, said
    assert re.fullmatch(r"requeue \d+\n", (tmp_path / "scontrol.log").read_text())
    done = max(losses(run))
    assert checkpoint.steps(run / "checkpoints") == [done] and done < 30

    code, said = ended(sbatch(*options, "run.name=slurm", nodes=2, restarts=1))
    assert code == 0 and f"going on from step {done}" in said, said
    ranks.train(2, "whole", "device=cpu", *given)
    ranks.same("whole", "slurm")


def test_the_script_asks_for_what_its_body_needs() -> None:
    seconds = int(header("signal").removeprefix("USR1@"))
    assert 60 <= seconds <= 600
    assert int(header("ntasks-per-node")) == int(header("gpus-per-node")), "one task per GPU"
    assert "#SBATCH --requeue" in SCRIPT.read_text() and header("open-mode") == "append"
    assert "--gpus-per-task" not in SCRIPT.read_text(), (
        "a rank chooses its GPU by SLURM_LOCALID among all of its node's"
    )
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, 0, True), (75, 9, True), (75, 10, False), (134, 0, True), (142, 0, True), (138, 99, True)]
    + [(code, 0, False) for code in (0, 1, 2, 3, 7, 137, 143)],
)
def test_what_failed_around_a_run_is_requeued_and_an_error_of_the_run_is_not(
    sbatch: Start, tmp_path: Path, code: int, restarts: int, requeued: bool
) -> None:
    """The ranks are not started: `srun` ends with their code. At once after a start at most ten
    times.
    """
    (tmp_path / "bin/srun").write_text(f"#!/bin/sh\nexit {code}\n")
    found, said = ended(sbatch("model=llama_8b", restarts=restarts))
    assert (
        found == (0 if requeued else code) and (tmp_path / "scontrol.log").exists() == requeued
    ), said


@pytest.mark.parametrize(
    ("left", "requeued"), [("4:58", True), ("0:12", True), ("1:04:58", False), ("2-0:0:1", False)]
)
def test_torchruns_job_is_requeued_at_the_limit_alone(
    sbatch: Start, tmp_path: Path, left: str, requeued: bool
) -> None:
    """torchrun ends with 1 after a signal as after an error."""
    (tmp_path / "bin/srun").write_text(
        '#!/bin/sh\necho $TORCH_ELASTIC_SHUTDOWN_TIMEOUT "$@" > srun.log\nexit 1\n'
    )
    (tmp_path / "left").write_text(f"{left}\n")
    found, said = ended(sbatch("model=llama_8b", nodes=2, RESTARTS="3"))
    assert found == (0 if requeued else 1) and (tmp_path / "scontrol.log").exists() == requeued, (
        said
    )
    seconds, *words = (tmp_path / "srun.log").read_text().split()
    assert int(seconds) < int(header("signal").partition("@")[2]), "ranks save before the limit"
    read = get_args_parser().parse_args(words[words.index("torch.distributed.run") + 1 :])
    assert "--ntasks=2" in words and read.max_restarts == 3 and "SIGUSR1" in read.signals_to_handle
    assert read.module and [read.training_script, *read.training_script_args] == [
        "fp4train",
        "model=llama_8b",
    ]


@pytest.mark.long
def test_a_job_of_torchruns_trains_to_its_end(ranks: Ranks, sbatch: Start, tmp_path: Path) -> None:
    code, said = ended(sbatch(*ranks.tiny("device=cpu", "run.name=a"), RESTARTS="1"))
    assert code == 0 and len(losses(tmp_path / "runs/a")) == 4, said


def test_the_script_says_which_network_ranks_take() -> None:
    assert re.search(r"GLOO_SOCKET_IFNAME=\w+ NCCL_SOCKET_IFNAME=\w+", SCRIPT.read_text())
