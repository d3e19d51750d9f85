"""Whoever takes an older checkpoint, because the newest is damaged, says so: each verb and key that
reads weights.
"""

import os
from pathlib import Path

import pytest
from command_line import Cli

SAVED = ("run.name=a", "train.steps=4", "checkpoint.every=2", "phases=none", "schedule=constant")
WARNING = "warning: checkpoint step_00000004 cannot be used (weights.safetensors has"
SHORT = ("train.steps=2", "phases=none", "schedule=constant")


@pytest.fixture
def damaged(cli: Cli) -> Path:
    """A run with checkpoints of steps 2 and 4, whose newest weights have lost their last four
    bytes.
    """
    run = cli.trained(*SAVED)
    weights = run / "checkpoints/step_00000004/weights.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    return run


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("run.name=b", "init=runs/a", *SHORT), id="init"),
        pytest.param(("run.name=b", "teacher=runs/a", *SHORT), id="teacher"),
        pytest.param(("resume=runs/a", "train.steps=5", "run.name=b"), id="resume"),
    ],
)
def test_training_with_an_older_checkpoint_says_so(
    cli: Cli, damaged: Path, command: tuple[str, ...]
) -> None:
    ended = cli(*command)
    assert ended.code == 0, ended.err
    assert WARNING in ended.err and "step_00000002 is taken in its place" in ended.err


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("eval", "runs/a", "batches=1", "record=false"), id="eval"),
        pytest.param(("sample", "runs/a", "prompt=the", "tokens=2"), id="sample"),
        pytest.param(
            ("sensitivity", "runs/a", "batches=1", "repeats=1"),
            id="sensitivity",
            marks=pytest.mark.long,
        ),
    ],
)
def test_reading_an_older_checkpoint_says_so(
    cli: Cli, damaged: Path, command: tuple[str, ...]
) -> None:
    ended = cli.raw(*command)
    assert WARNING in ended.err and ended.err.count("is taken in its place") == 1, ended.err


def test_a_checkpoint_that_is_asked_for_has_no_other_in_its_place(cli: Cli, damaged: Path) -> None:
    for command in (("eval", "runs/a", "step=4"), ("sample", "runs/a", "step=4", "prompt=a")):
        refused = cli.raw(*command)
        assert refused.code == 1 and "step_00000004: weights.safetensors has" in refused.message
