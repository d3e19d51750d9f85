"""Signals and kills: a run that is asked to end saves first, a killed one goes on from its last
checkpoint.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, before_steps, losses

import fp4train.train as loop

STEADY = ("phases=none", "schedule=constant")


def test_a_signal_ends_the_run_after_its_step_and_it_goes_on_to_the_bit(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.trained("run.name=whole", "train.steps=4", "eval.every=2", *STEADY)

    def act(run: Any) -> None:
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    before_steps(monkeypatch, act)
    ended = cli("run.name=a", "train.steps=4", "eval.every=2", *STEADY)
    assert ended.code == 128 + signal.SIGTERM
    assert "runs/a: step 3, stopped by SIGTERM, resume=runs/a goes on" in ended.out
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    os.chdir(cli.folder)
    assert cli("resume=runs/a").code == 0
    assert losses("runs/a") == losses("runs/whole")


def test_a_signal_while_a_checkpoint_is_written_loses_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.save

    def save(run: Any, **options: Any) -> None:
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        original(run, **options)

    monkeypatch.setattr(loop, "save", save)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 143
    assert [p.name for p in Path("runs/a/checkpoints").iterdir()] == ["step_00000002"]


def test_a_signal_that_is_to_be_ignored_is_ignored(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_steps(monkeypatch, lambda run: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli("run.name=a", "train.steps=2").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)
