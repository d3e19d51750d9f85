"""Every ending saves: signals, exceptions, and a directory that goes away."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    STEADY,
    Before,
    Cli,
    events,
    lines,
    losses,
    steps,
    wait_for,
)
from limits import set_limit

from fp4train import checkpoint
from fp4train.checkpoint import CheckpointError
from fp4train.config.overrides import quoted

SIGNALS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU),
    *(signal.SIGINT, signal.SIGHUP),
)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_signals_end_a_run_saved(cli: Cli, before: Before, number: signal.Signals) -> None:
    def twice(run: Any) -> None:
        os.kill(os.getpid(), number)
        if number == signal.SIGXCPU:
            os.kill(os.getpid(), number)  # the system repeats it every second

    before(2, twice)
    # a shell's background process ignores some, and so would the run
    ours = signal.signal(number, signal.SIG_DFL)
    try:
        ended = cli("run.name=a", "train.steps=4", *STEADY)
    finally:
        signal.signal(number, ours)
    assert (
        ended.code == 128 + number
        and f"stopped by {number.name}, resume=runs/a goes on" in ended.out
    )
    assert steps() == [3]


@pytest.mark.long
def test_what_a_run_in_a_folder_of_odd_name_advises_can_be_pasted_into_a_shell(
    cli: Cli, before: Before
) -> None:
    folder = "runs/it's [a];$b & c"
    command = ("train.steps=4", *STEADY)
    before(2, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    stopped = cli(quoted("run.dir", folder), *command)
    (advised,) = re.findall(r"SIGTERM, (resume=.*) goes on", stopped.out)
    assert cli.raw(*shlex.split(advised)).code == 0
    finished = cli.raw(*shlex.split(advised))
    (advised,) = re.findall(r"done\. (resume=.*) train\.steps=… goes on", finished.out)
    assert cli.raw(*shlex.split(advised), "train.steps=5").code == 0
    checkpoint.set_doubt(Path(folder, "checkpoints"), 5, "the loss is 5.5", good=4)
    checked = cli.raw("check", folder)
    (advised,) = re.findall(r"\((resume=.* resume_step=4)\)", checked.err)
    assert cli.raw("plan", *shlex.split(advised)).code == 0


def test_a_signal_whose_save_fails_promises_nothing(
    cli: Cli, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*rest: Any, **options: Any) -> Path:
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(checkpoint, "save", full)
    set_limit(monkeypatch, "pauses before the last checkpoint is tried again", ())
    before(2, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    ended = cli("run.name=a", *STEADY)
    assert ended.code == 128 + signal.SIGTERM
    assert "its end is not saved" in ended.out and "goes on" not in ended.out


def test_any_exception_saves_what_was_before_it(cli: Cli, before: Before) -> None:
    def fail(run: Any) -> None:
        raise RuntimeError("of somebody's plugin")

    before(3, fail)
    with pytest.raises(RuntimeError, match="of somebody's plugin"):
        cli.raw(*cli.tiny("run.name=a", "checkpoint.every=0", *STEADY))
    assert steps() == [3]
    assert "of somebody's plugin" in events("runs/a", "error")[0]["message"]
    assert cli("resume=runs/a").code == 0
    cli.trained("run.name=whole", *STEADY)
    assert losses("runs/a") == losses("runs/whole")


def test_an_exception_amid_an_update_saves_no_torn_weights(cli: Cli, before: Before) -> None:
    def tear(run: Any) -> None:
        def step(*_: Any) -> None:
            raise RuntimeError("half-way")

        run.optimizer.step = step

    before(3, tear)
    with pytest.raises(RuntimeError, match="half-way"):
        cli.raw(*cli.tiny("run.name=a", "checkpoint.every=2", *STEADY))
    assert "interrupted while the weights were updated" in cli.capture.readouterr().err
    assert steps() == [2]


@pytest.mark.parametrize("at", [2, 3], ids=["while it trains", "at its end"])
def test_a_directory_that_is_moved_is_noticed_and_gets_the_checkpoint(
    cli: Cli, before: Before, at: int
) -> None:
    def move(run: Any) -> None:
        os.rename("runs/a", "runs/moved")

    before(at, move)
    ended = cli("run.name=a", "train.steps=4", "checkpoint.every=0", *STEADY)
    assert ended.code == 1 and "runs/a was moved to" in ended.message
    assert steps("runs/moved") and not Path("runs/a/checkpoints").exists()


@pytest.mark.long
def test_a_directory_that_is_removed_is_noticed(cli: Cli, before: Before) -> None:
    before(2, lambda run: shutil.rmtree("runs/a"))
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 1 and "runs/a was removed while the run trained in it" in ended.message


def test_a_lock_that_is_removed_is_noticed(cli: Cli, before: Before) -> None:
    before(2, lambda run: Path("runs/a/.lock").unlink())
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 1 and "runs/a/.lock was removed" in ended.message
    assert steps() == [4], "nobody else trains there: it is saved"


@pytest.mark.long
def test_a_terminal_that_is_closed_ends_a_run_saved_with_its_code(cli: Cli) -> None:
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(cli.folder)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [
            sys.executable,
            "-m",
            "fp4train",
            *cli.tiny("run.name=a", "train.steps=100000", *STEADY),
        ]
        os.execve(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for(lambda: Path("runs/a/metrics.jsonl").exists() and len(lines("runs/a")) > 3)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert steps() == [max(losses("runs/a"))]


@pytest.mark.long
def test_a_run_whose_standard_streams_are_closed_trains_and_ends_with_0(cli: Cli) -> None:
    command = [sys.executable, "-m", "fp4train", *cli.tiny("run.name=a", "train.steps=2", *STEADY)]
    ended = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0 and steps() == [2]
    assert sorted(losses("runs/a")) == [1, 2]
