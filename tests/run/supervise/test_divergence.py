"""A loss far above its past is said, ends the run, or takes it back; the newest checkpoint is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import STEADY, Cli, before_steps, events, losses, marked, steps

from fp4train import checkpoint
from fp4train.run.record import journal
from fp4train.run.supervise.loss_history import Divergence

RUN = (
    "recipe=bf16",
    "model.layers=1",
    "train.batch_size=2",
    "train.steps=24",
    "eval.every=0",
    "checkpoint.every=5",
    "checkpoint.keep=1",
    *STEADY,
)
REWIND = (*RUN, "train.on_divergence=rewind")
Poison = Callable[..., list[int]]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """`poison(12)`: the batch at place 12 of the data ruins the weights, whenever it is trained on;
    returns the places of the batches that are trained on from now on. `dies=20`: the process dies
    as the 20th step begins.
    """
    bad = []
    seen = []
    dying = []

    def act(run: Any) -> None:
        seen.append(run.batch_index)
        if len(seen) in dying:
            raise SystemExit(137)
        if run.batch_index in bad:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.mul_(30)

    before_steps(monkeypatch, act)

    def choose(*batches: int, dies: int | None = None) -> list[int]:
        bad[:] = batches
        dying[:] = [dies]
        seen.clear()
        return seen

    return choose


def state(run: str) -> dict[str, bytes]:
    found = checkpoint.load(Path(run) / "checkpoints")
    return {name: tensor.numpy().tobytes() for name, tensor in found.tensors.items()}


def rewinds(run: str) -> list[journal.Record]:
    return [record for record in journal.read_journal(Path(run)) if record.event == "rewind"]


def test_a_run_that_diverges_from_its_start_says_so_and_keeps_its_newest_checkpoints_marked(
    cli: Cli,
) -> None:
    command = (*RUN, "checkpoint.every=2", "optim.lr=10", "train.steps=10")
    ended = cli("run.name=a", *command)
    assert ended.code == 3
    assert (
        ended.err.count("far above its past (5.7") == 1
        and "since step 2. No checkpoint of this run is good" in ended.err
    )
    assert "done; " in ended.out and "diverged: the validation loss is" in ended.out
    assert [event["since"] for event in events("runs/a", "divergence")] == [2]
    assert steps() == [8, 10] == sorted(marked("runs/a"))
    ended = cli("resume=runs/a", "train.steps=12")
    assert ended.code == 3 and "none of the run is known to be good" in ended.err
    assert steps() == [10, 12] == sorted(marked("runs/a"))
    ended = cli("run.name=b", *command, "checkpoint.every=4", "train.on_divergence=stop")
    assert (
        ended.code == 3
        and "far above its past" in ended.message
        and "lower rate (optim.lr=… run.overwrite=true)" in ended.message
    )
    assert ended.message.startswith("step 6: ")
    assert steps("runs/b") == [4, 7] == sorted(marked("runs/b")), "the state where it stopped, too"


def test_a_branch_without_a_good_checkpoint_starts_over_as_it_says(cli: Cli) -> None:
    """With what the command changed, and where `run.dir` is another than runs/NAME."""
    assert cli("run.name=a", *RUN, "train.steps=6").code == 0
    command = ("resume=runs/a", "run.dir=b", "train.steps=12")
    ended = cli(*command, "optim.lr=10")
    assert ended.code == 3
    advice = "optim.lr=… run.overwrite=true"
    assert f"the command that began it and a lower rate ({advice})" in ended.err
    assert cli(*command, *advice.replace("…", "0.001").split()).code == 0
    assert steps("b")[-1] == 12 and not marked("b")


def test_an_end_above_its_beginning_is_not_the_good_checkpoint_that_its_message_names(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its evaluation fits the losses since the update that ruined the weights."""
    monkeypatch.setattr(Divergence, "ends_above_its_beginning", lambda *_: True)
    ended = cli("run.name=a", *RUN, "optim.lr=1e-5")
    assert "ends above where it began" in ended.out and list(marked("runs/a")) == [24]
    assert "The last good checkpoint is that of step 20" in ended.out and steps() == [20, 24]
    assert "going on from step 20" in cli("resume=runs/a", "resume_step=20").err


@pytest.mark.parametrize(
    ("lr", "mode"),
    [
        ("10", "warn"),
        *(pytest.param("10", mode, marks=pytest.mark.long) for mode in ("stop", "rewind")),
        *(pytest.param("1e3", mode, marks=pytest.mark.long) for mode in ("warn", "stop", "rewind")),
    ],
)
def test_a_rate_that_ruins_a_good_run_leaves_its_good_checkpoint(
    cli: Cli, lr: str, mode: str
) -> None:
    assert cli("run.name=a", *RUN, "train.steps=10").code == 0
    options = (
        "train.steps=20",
        "checkpoint.every=1",
        f"train.on_divergence={mode}",
        "train.rewinds=2",
    )
    ended = cli("resume=runs/a", *options, f"optim.lr={lr}")
    said = ended.out if (lr, mode) == ("10", "warn") else ended.message
    assert "far above its past" in said and ("nan" in said) == (lr == "1e3")
    kept = steps()[0]
    assert kept in (10, 11) and f"resume=runs/a resume_step={kept} " in said
    assert len(rewinds("runs/a")) == (2 if mode == "rewind" else 0)
    assert ("the run went back 2 times (train.rewinds)" in said) == (
        mode == "rewind" and lr == "10"
    )
    assert ended.code == 3
    goes_on = cli(
        "resume=runs/a", f"resume_step={kept}", "optim.lr=0.001", "train.on_divergence=stop"
    )
    assert goes_on.code == 0 and "far above" not in goes_on.err + goes_on.out


def test_a_run_goes_back_and_past_the_batches_since(cli: Cli, poison: Poison) -> None:
    seen = poison(12)
    ended = cli("run.name=a", *REWIND)
    assert ended.code == 0 and "diverged" not in ended.out
    assert (
        "step 17: the loss is" in ended.err
        and "going on from step 10; batches 10–16 are skipped" in ended.err
    )
    assert seen == [*range(18), *range(17, 31)], (
        "batch 17 was queued when the loss of the one before was read"
    )
    assert sorted(losses("runs/a")) == list(range(1, 25)), "each step is logged once"
    (record,) = rewinds("runs/a")
    assert (
        record.step == 10
        and "the loss diverged at step 13; batches 10–16 are skipped" in record.describe()
    )
    assert "batches 10–16 are skipped" in cli.raw("plan", "runs/a").out
    assert events("runs/a", "rewind")[0]["skipped"] == [10, 16]


@pytest.mark.long
@pytest.mark.parametrize("dies", [8, 15, 18, 19, 22, 30], ids="as step {} begins".format)
def test_a_run_that_went_back_and_is_resumed_equals_one_without_interruption(
    cli: Cli, poison: Poison, dies: int
) -> None:
    poison(12, 20)
    assert cli("run.name=whole", *REWIND, "recipe=nvfp4").code == 0
    assert [record.step for record in rewinds("runs/whole")] == [10, 10]
    poison(12, 20, dies=dies)
    assert cli("run.name=a", *REWIND, "recipe=nvfp4").code == 137
    poison(12, 20)
    assert cli("resume=runs/a").code == 0
    assert losses("runs/a") == losses("runs/whole")
    assert state("runs/a") == state("runs/whole")


@pytest.mark.long
def test_a_second_divergence_before_the_next_milestone_goes_further_back(
    cli: Cli, poison: Poison
) -> None:
    seen = poison(12, 19)
    assert cli("run.name=a", *REWIND, "checkpoint.keep=2").code == 0
    assert [record.step for record in rewinds("runs/a")] == [10, 5]
    assert seen[18:] == [*range(17, 25), *range(24, 43)]


@pytest.mark.long
def test_a_loss_that_is_not_finite_takes_a_run_back_that_may_go_back(
    cli: Cli, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = poison()

    def act(run: Any) -> None:
        if run.batch_index == 12:
            handle = next(run.model.parameters()).register_hook(
                lambda g: (handle.remove(), g * torch.nan)[1]
            )

    before_steps(monkeypatch, act)
    ended = cli("run.name=a", *REWIND)
    assert ended.code == 0 and "step 12: gradient norm is nan" in ended.err
    assert "going on from step 10; batches 10–12 are skipped" in ended.err
    assert seen == [*range(14), *range(13, 27)], "batch 13 was queued, and changed nothing"


def test_milestones_are_kept_at_growing_distance(cli: Cli) -> None:
    assert (
        cli(
            "run.name=a", *RUN, "train.steps=20", "checkpoint.every=1", "checkpoint.milestones=2"
        ).code
        == 0
    )
    old, young, newest = steps()
    assert newest == 20 and 1 <= 20 - young < 4 <= 20 - old < 16


@pytest.mark.long
def test_a_resumed_run_knows_that_its_newest_checkpoint_is_ruined(cli: Cli, poison: Poison) -> None:
    poison(12)
    assert cli("run.name=a", *RUN).code == 3
    assert steps() == [10, 20, 24], "ruined, and beside the good one"
    assert sorted(marked("runs/a")) == [20, 24]
    ended = cli("resume=runs/a", "train.steps=30", "train.on_divergence=rewind")
    assert ended.code == 0 and "going on from step 10; batches 10–23 are skipped" in ended.err
    assert "diverged" not in ended.out
