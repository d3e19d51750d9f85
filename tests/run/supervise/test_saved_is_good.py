"""Only what is good is saved: weights, moments and losses are finite before a checkpoint counts as
one.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import (
    STEADY,
    Cli,
    after_update,
    steps,
)

import fp4train.train as loop
from fp4train.run.supervise.saving import Saver


def test_weights_that_are_finite_and_useless_do_not_replace_the_last_good_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruin(run: Any) -> None:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.fill_(1e38)

    after_update(3, monkeypatch, ruin)
    ended = cli("run.name=a", "checkpoint.every=1", "checkpoint.keep=1", *STEADY)
    assert ended.code == 1 and "the one of step 2 is kept" in ended.message
    assert steps() == [2, 3]
    monkeypatch.undo()
    os.chdir(cli.folder)
    shutil.rmtree("runs/a/checkpoints/step_00000003")
    assert cli("resume=runs/a").code == 0


def test_a_bad_row_that_no_loss_sees_is_not_saved_and_the_run_does_not_end_well(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(run: Any) -> None:
        with torch.no_grad():
            weight = next(p for n, p in run.model.named_parameters() if "embed" in n)
            weight[200] = torch.inf  # a byte that is not in the text

    after_update(5, monkeypatch, spoil)
    ended = cli("run.name=a", "checkpoint.every=1", "checkpoint.keep=1", *STEADY)
    assert ended.code == 1 and "embed" in ended.message
    assert steps() == [4]


def test_a_moment_that_is_not_finite_is_not_saved(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(run: Any) -> None:
        next(iter(run.optimizer.state.values()))["exp_avg_sq"][0] = torch.inf

    after_update(6, monkeypatch, spoil)
    ended = cli("run.name=a", "checkpoint.every=5", *STEADY)
    assert ended.code == 1 and "exp_avg_sq" in ended.message and "step 5" in ended.message
    assert steps() == [5]


def test_a_run_of_one_step_that_ends_in_infinity_does_not_end_well(cli: Cli) -> None:
    ended = cli("run.name=a", "train.steps=1", "optim.lr=1e38", *STEADY)
    assert ended.code == 1 and "there is no checkpoint" in ended.message
    assert not Path("runs/a/checkpoints").exists() or steps() == []


@pytest.mark.parametrize("key", ["val/loss", "val/loss_recipe"])
def test_a_validation_loss_that_is_no_number_does_not_end_well(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    original = loop.evaluate
    monkeypatch.setattr(
        loop, "evaluate", lambda run, recipe: original(run, recipe) | {key: float("nan")}
    )
    ended = cli("run.name=a", "train.steps=2", "checkpoint.every=1", *STEADY)
    assert ended.code == 1 and "validation loss" in ended.message and "step 1" in ended.message
    assert steps() == [1], "the state that gave it is not saved"


def zeroed(run: Any) -> None:
    """The weights tell nothing from here on."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()


def test_weights_that_tell_nothing_while_the_loss_falls_cost_no_good_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 41 of 60 the loss goes back to that of equally likely bytes, within what it was some
    steps ago.
    """

    after_update(41, monkeypatch, zeroed)
    ended = cli(
        "run.name=a",
        "recipe=bf16",
        "train.steps=60",
        "optim.lr=0.01",
        "checkpoint.every=10",
        "checkpoint.keep=2",
        *STEADY,
    )
    assert ended.code == 3 and "diverged: the loss " in ended.out
    assert "far above its past (" in ended.err and "since step 42" in ended.err
    assert "The last good checkpoint is that of step 40" in ended.err
    assert 40 in steps()


def test_an_evaluation_whose_loss_is_finite_and_useless_proves_no_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state is evaluated before it is saved; that of step 40 tells nothing."""
    original = Saver.begin
    proven: dict[int, bool] = {}

    def begin(self: Saver, **options: Any) -> bool:
        proven[self.run.step] = options.get("proven", False)
        return original(self, **options)

    monkeypatch.setattr(Saver, "begin", begin)
    after_update(40, monkeypatch, zeroed)
    ended = cli(
        "run.name=a",
        "recipe=bf16",
        "train.steps=60",
        "optim.lr=0.01",
        "checkpoint.every=10",
        "eval.every=10",
        *STEADY,
    )
    assert ended.code == 3 and "The last good checkpoint is that of step 30" in ended.err
    assert [proven[step] for step in (10, 20, 30, 40)] == [True, True, True, False]


def test_a_checkpoint_that_its_evaluation_proves_is_the_good_one_of_a_resume(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=4", "eval.every=2", "checkpoint.every=2", *STEADY)
    state = json.loads(Path("runs/a/checkpoints/step_00000004/state.json").read_text())["state"]
    assert state["good"] == 4
