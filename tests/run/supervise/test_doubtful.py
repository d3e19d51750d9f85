"""A checkpoint that may be useless has a mark, of which everything tells that loads it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import STEADY, Cli, after_update, before_steps, marked, steps

from fp4train import checkpoint

RUN = (
    "recipe=bf16",
    "model.layers=1",
    "train.batch_size=2",
    "train.steps=30",
    "eval.every=0",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "optim.lr=1e-5",
    *STEADY,
)


@torch.no_grad()
def scale(run: Any, factor: float) -> None:
    for parameter in run.model.parameters():
        parameter.mul_(factor)


def scaled(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """The weights are multiplied by a factor as a step begins, by step."""

    before_steps(monkeypatch, lambda run: scale(run, factors.get(run.step, 1)))


@pytest.mark.parametrize(
    "door",
    [
        "resume=runs/a train.steps=8",
        "resume=runs/a resume_step=6 run.name=branch train.steps=8",
        "init=runs/a run.name=new train.steps=1",
        "teacher=runs/a run.name=new train.steps=1",
        "check runs/a",
        "export runs/a to=hf out=hf",
        "eval runs/a batches=1",
    ],
)
def test_every_door_says_that_a_checkpoint_is_doubtful_and_names_the_good_one(
    cli: Cli, door: str
) -> None:
    cli.trained("run.name=a", "checkpoint.every=2", "checkpoint.keep=9")
    checkpoint.set_doubt(Path("runs/a/checkpoints"), 5, "the loss is 5.5, far above", good=4)
    words = door.split()
    ended = cli(*words) if "=" in words[0] else cli.raw(*words)
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.err.splitlines() if "doubtful" in line]
    assert line == (
        "warning: checkpoint step_00000006 of runs/a is doubtful: the loss is 5.5, far above; the "
        "newest good one is runs/a@4 (resume=runs/a resume_step=4)"
    )
    if words[0] == "export":
        card = Path("hf/README.md").read_text()
        assert "**This checkpoint is doubtful:** the loss is 5.5, far above." in card


@pytest.mark.parametrize(
    "door", ["resume=runs/a resume_step=4 train.steps=8", "eval runs/a@4 batches=1"]
)
def test_no_door_doubts_the_good_checkpoint_of_a_run(cli: Cli, door: str) -> None:
    cli.trained("run.name=a", "checkpoint.every=2", "checkpoint.keep=9")
    checkpoint.set_doubt(Path("runs/a/checkpoints"), 3, "the loss is 5.5, far above", good=4)
    assert list(marked("runs/a")) == [6]
    ended = cli.raw(*door.split())
    assert ended.code == 0 and "doubtful" not in ended.err
    assert list(marked("runs/a")) == ([] if "resume" in door else [6]), "what was abandoned is gone"


def test_a_divergence_marks_the_checkpoints_from_its_beginning_and_later_ones_are_judged_anew(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(monkeypatch, {8: 30, 15: 1 / 30})
    ended = cli("run.name=a", *RUN, "train.steps=15")
    assert ended.code == 3 and "diverged: the validation loss is" in ended.out
    assert 7 in steps() and "The last good checkpoint is that of step 7: go on from" in ended.out
    assert sorted(marked("runs/a")) == list(range(8, 16))
    assert all("far above its past (5." in doubt for doubt in marked("runs/a").values())
    ended = cli("resume=runs/a", "train.steps=30")
    assert ended.code == 0 and "back within its past" in ended.err and "diverged" not in ended.out
    assert "checkpoint step_00000015 of runs/a is doubtful" in ended.err
    assert max(marked("runs/a"), default=0) < 26 and steps()[-1] == 30


def test_the_good_checkpoint_that_a_divergence_names_stays_when_the_loss_is_back(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if one batch is noisy later, and the run is resumed."""
    scaled(monkeypatch, {8: 30, 15: 1 / 30, 24: 30, 25: 1 / 30})
    ended = cli("run.name=a", *RUN, "train.steps=30", "checkpoint.keep=1")
    assert ended.code == 0 and "The last good checkpoint is that of step 7: go on" in ended.err
    assert "back within its past" in ended.err
    assert steps() == [7, 30]
    assert cli("resume=runs/a", "train.steps=33").code == 0
    assert steps() == [7, 33]


def dies_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies as that step begins."""

    def die(run: Any) -> None:
        if run.step == step:
            raise SystemExit(137)

    before_steps(monkeypatch, die)


def test_a_state_that_no_loss_has_judged_is_not_good_because_a_command_names_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update before it ruined it, and the process died before that was seen."""
    with monkeypatch.context() as patch:
        after_update(8, patch, lambda run: scale(run, 30))
        dies_at(10, patch)
        assert cli("run.name=a", *RUN).code == 137
    assert 8 not in marked("runs/a") and 9 in marked("runs/a")
    ended = cli("resume=runs/a", "resume_step=8", "train.steps=16")
    assert ended.code == 3 and "The last good checkpoint is that of step 7: go on" in ended.err
    assert sorted(marked("runs/a")) == list(range(8, 17)) and 7 in steps()


@pytest.mark.parametrize(
    ("died", "told"),
    [(8, "No checkpoint of this run is good"), (12, "The last good checkpoint is that of step 10")],
)
def test_a_run_that_diverges_with_its_first_loss_keeps_the_checkpoint_that_it_goes_on_from(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, died: int, told: str
) -> None:
    """Also where the one that its state names as the good one was pruned since."""
    with monkeypatch.context() as patch:
        dies_at(died, patch)
        options = ("checkpoint.every=5", "checkpoint.keep=1", "train.steps=25")
        assert cli("run.name=a", *RUN, *options).code == 137
    (newest,) = steps()
    scaled(monkeypatch, {newest: 30})
    ended = cli("resume=runs/a")
    assert ended.code == 3 and told in ended.err and newest in steps()


def test_a_mark_goes_where_the_high_losses_were_but_noise_of_a_batch(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(monkeypatch, {8: 30, 10: 1 / 30})
    ended = cli("run.name=a", *RUN, "train.steps=10", "checkpoint.every=5")
    assert ended.code == 3 and list(marked("runs/a")) == [10], "the weights are bad at its end"
    ended = cli("run.name=b", *RUN, "train.steps=14")
    assert ended.code == 0 and len(steps("runs/b")) >= 9 and not marked("runs/b")


def test_an_evaluation_at_the_end_judges_the_last_state(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One high loss, of a bad batch or of weights that the last updates ruined."""
    scaled(monkeypatch, {9: 30})
    command = (*RUN, "train.steps=10", "checkpoint.every=5", "eval.every=10")
    ended = cli("run.name=a", *command)
    assert ended.code == 3 and "diverged: the validation loss is" in ended.out, (
        "the weights themselves are bad"
    )
    assert list(marked("runs/a")) == [10]

    after_update(10, monkeypatch, lambda run: scale(run, 1 / 30))
    ended = cli("run.name=b", *command)
    assert ended.code == 0 and not marked("runs/b") and "doubtful" not in ended.out


@pytest.mark.parametrize("evaluations", [1, 2])
def test_weights_that_the_last_update_ruins_are_a_divergence(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, evaluations: int
) -> None:
    """Of one evaluation nothing but its height tells so; of two, that it rose to ln V."""
    factor = 30.0 if evaluations == 1 else 0.0
    after_update(20, monkeypatch, lambda run: scale(run, factor))
    learns = ("train.steps=20", "optim.lr=0.01", f"eval.every={20 // evaluations}")
    ended = cli("run.name=a", *RUN, *learns)
    assert ended.code == 3 and "the validation loss is" in ended.out
    assert "since step 20." in ended.out
    assert list(marked("runs/a")) == [20] and "far above its past" in marked("runs/a")[20]


def test_the_same_command_after_a_diverged_run_tells_it_again(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher gives it that starts a run again which did not end with 0."""
    scaled(monkeypatch, {8: 30})
    command = ("run.name=a", *RUN, "train.steps=15")
    assert cli(*command).code == 3
    again = cli(*command)
    assert again.code == 3 and "finished" in again.out and "is doubtful" in again.err


def test_a_sweep_goes_on_past_a_run_that_diverges(cli: Cli) -> None:
    options = (*RUN, "train.steps=10", "checkpoint.every=0")
    ended = cli("-m", *options, "optim.lr=10,1e-4")
    assert ended.code == 3
    table = ended.out.splitlines()
    assert [line.endswith("diverged") for line in table if line.startswith("optim.lr=")] == [
        True,
        False,
    ]


def test_a_mark_is_part_of_what_is_verified(cli: Cli) -> None:
    cli.trained("run.name=a")
    state = Path("runs/a/checkpoints/step_00000006/state.json")
    checkpoint.set_doubt(state.parent.parent, 6, "the loss is 5.5, far above")
    state.write_text(state.read_text().replace("5.5", "1.5"))
    ended = cli.raw("eval", "runs/a", "batches=1")
    assert ended.code == 1 and "state.json is damaged" in ended.message
    checkpoint.set_doubt(state.parent.parent, 6, None)
    assert "1.5" in state.read_text(), "what is damaged stays as it is"
