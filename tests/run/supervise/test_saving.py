"""Checkpoints that are written beside the loop, and retried."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import PATIENCE, STEADY, Cli, before_steps, events, losses, steps
from limits import set_limit

import fp4train.train as loop
from fp4train import checkpoint
from fp4train.checkpoint import CheckpointError


def test_steps_go_on_while_a_checkpoint_is_written_and_two_never_overlap(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.save
    begin = loop.save
    log = []
    due = {step: threading.Event() for step in (2, 4, 6)}

    def save(run: Any, **options: Any) -> None:
        due[run.step].set()
        begin(run, **options)

    def slow(folder: Any, step: int, *rest: Any, **options: Any) -> Path:
        """Is not done before the next checkpoint is due, which has time to begin beside it."""
        log.append(("begin", step))
        due[min(step + 2, 6)].wait(PATIENCE)
        time.sleep(0.1)
        log.append(("end", step))
        return original(folder, step, *rest, **options)

    monkeypatch.setattr(loop, "save", save)
    monkeypatch.setattr(checkpoint, "save", slow)
    before_steps(monkeypatch, lambda run: log.append(("step", run.step)))
    assert cli("run.name=a", "checkpoint.every=2", "checkpoint.keep=3", *STEADY).code == 0
    assert log.index(("step", 2)) < log.index(("end", 2)), (
        "step 2 ran while its checkpoint was written"
    )
    assert (
        log.index(("end", 2))
        < log.index(("begin", 4))
        < log.index(("end", 4))
        < log.index(("begin", 6))
    )
    monkeypatch.undo()
    os.chdir(cli.folder)
    for step in steps():
        state = checkpoint.load(Path("runs/a/checkpoints"), step).tensors
        assert cli(f"run.name=to{step}", f"train.steps={step}", *STEADY).code == 0
        whole = checkpoint.load(Path(f"runs/to{step}/checkpoints"), step).tensors
        assert all(torch.equal(state[name], whole[name]) for name in whole), (
            "the state of its own step"
        )


def test_a_disk_that_does_not_answer_is_left_behind(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.save
    begun = threading.Event()
    released = threading.Event()

    def stuck(folder: Any, step: int, *rest: Any, **options: Any) -> Path:
        if step == 2:
            begun.set()
            released.wait(PATIENCE)
            raise CheckpointError("The disk answered after the run.")
        return original(folder, step, *rest, **options)

    def wait_less(run: Any) -> None:
        """From when the disk is stuck: the buffers of the copy are made before."""
        if run.step == 2:
            assert begun.wait(PATIENCE)
            set_limit(monkeypatch, "seconds for a checkpoint", 0.05)

    monkeypatch.setattr(checkpoint, "save", stuck)
    before_steps(monkeypatch, wait_less)
    set_limit(monkeypatch, "pauses before the last checkpoint is tried again", ())
    try:
        ended = cli("run.name=a", "checkpoint.every=2", *STEADY)
    finally:
        released.set()
    assert ended.code == 1 and "a slow disk?" in ended.err and "not saved" in ended.out
    assert sorted(losses("runs/a")) == list(range(1, 7))


def test_metrics_and_record_are_durable_before_a_checkpoint_that_counts_on_them(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(Path.cwd()):  # no file of a run before that a thread still writes
            synced.append(path.name)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert cli("run.name=a", "train.steps=2", "checkpoint.every=1", *STEADY).code == 0
    # small files, under their temporary names or their own
    for name in ("config.yaml", "history.jsonl"):
        assert any(name in each for each in synced), name
    wrote = [at for at, name in enumerate(synced) if "state.json" in name]
    assert len(wrote) == 2 and all("metrics.jsonl" in synced[:at] for at in wrote)
    assert "metrics.jsonl" in synced[wrote[0] : wrote[1]], "the lines since the checkpoint before"


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.save

    def save(folder: Path, step: int, *rest: Any, **options: Any) -> Path:
        if step == 4:
            raise CheckpointError(
                "checkpoint of step 4 not written to runs/a: No space left on device."
            )
        return original(folder, step, *rest, **options)

    def wait(run: Any) -> None:
        """Until it has failed, so that step 5 is the first after which it can be tried again."""
        if run.step == 4:
            run.saver.wait()

    monkeypatch.setattr(checkpoint, "save", save)
    before_steps(monkeypatch, wait)
    ended = cli("run.name=a", "checkpoint.every=2")
    assert ended.code == 0 and "error: checkpoint of step 4 not written" in ended.err
    assert "No space left" in events("runs/a", "checkpoint failed")[0]["reason"]
    assert checkpoint.steps(Path("runs/a/checkpoints")) == [5, 6], (
        "the one that failed was tried again"
    )


@pytest.mark.long
def test_a_run_whose_last_checkpoint_is_lost_does_not_end_well(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*rest: Any, **options: Any) -> Path:
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(checkpoint, "save", save)
    ended = cli("run.name=a", "train.steps=2")
    assert ended.code == 1 and "No space left" in ended.err and "not saved" in ended.out
