"""The average of a run's weights is that of its formula, in every bit, and goes on after a stop."""

from pathlib import Path

import pytest
import torch
from command_line import STEADY, Cli, lines

from fp4train import checkpoint
from fp4train.checkpoint import WeightSource
from fp4train.exchange import export_huggingface, verify

DECAY = 0.75
EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep=9", f"train.ema={DECAY}")


def evaluated(run: str) -> list[dict[str, float]]:
    """The losses of the steps after which a run was evaluated."""
    return [
        {key: value for key, value in line.items() if key.startswith(("val/", "train/loss"))}
        for line in lines(run)
        if "val/loss" in line and "train/loss" in line
    ]


def tensors(run: str, step: int) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(Path(run) / "checkpoints", step).tensors)


def test_it_is_its_formula_over_the_weights_of_every_step(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=4", *EVERY_STEP, *STEADY)
    states = [tensors("runs/a", step) for step in range(1, 5)]
    names = [name.removeprefix("model/") for name in states[0] if name.startswith("model/")]
    assert len(names) > 10
    for name in names:
        average = states[0][f"model/{name}"].clone()
        for state in states[1:]:
            average += (state[f"model/{name}"] - average) * (1 - DECAY)
        assert torch.equal(states[-1][f"ema/{name}"], average), name
    (name, *_) = names
    assert not torch.equal(states[-1][f"ema/{name}"], states[-1][f"model/{name}"])


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=4", *EVERY_STEP, *STEADY)
    assert cli("resume=runs/a", "resume_step=2", "run.name=b").code == 0
    one, other = tensors("runs/a", 4), tensors("runs/b", 4)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert evaluated("runs/a")[-1] == evaluated("runs/b")[-1]


def test_it_is_evaluated_and_the_weights_are_as_they_were(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=3", "eval.every=1", *EVERY_STEP, *STEADY)
    cli.trained("run.name=b", "train.steps=3", "eval.every=1", *STEADY)
    first, *_, last = evaluated("runs/a")
    for line, without in zip(evaluated("runs/a"), evaluated("runs/b"), strict=True):
        assert {key: line[key] for key in without} == without
    assert first["val/loss_ema"] == first["val/loss"], "after one step it is the weights"
    assert last["val/loss_ema"] != last["val/loss"]


def test_it_is_exported_verified_evaluated_and_begun_with_by_its_name(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=3", *EVERY_STEP, *STEADY)
    average = WeightSource.parse("runs/a@2:ema")
    made = export_huggingface(average, Path("out"))
    assert any("keeps as ema" in note for note in made.notes)
    assert verify(Path("out"), average).equal
    assert not verify(Path("out"), WeightSource.parse("runs/a@2")).equal
    begins = ("optim.lr=1e-30", "init=runs/a@2:ema", *STEADY)
    assert cli("run.name=b", "train.steps=1", *begins).code == 0
    begun = tensors("runs/b", 1)
    for name, tensor in tensors("runs/a", 2).items():
        if name.startswith("ema/"):
            assert torch.equal(begun[name.replace("ema/", "model/")], tensor), name
    (line,) = [
        text
        for text in cli.raw("eval", "runs/a:ema", "batches=1", *cli.paths).out.splitlines()
        if "high" in text
    ]
    assert f"{evaluated('runs/a')[-1]['val/loss_ema']:.4f}" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("eval", "runs/a:ema"),
            "step_00000001 holds no ema: it has weights; a run with train.ema=0.999 keeps ema",
        ),
        (("eval", "runs/a@1", "step=1"), "runs/a@1 names the step 1, and step 1 is named beside"),
        (
            ("run.name=b", "init=runs/a:ema"),
            "holds no weights: the run keeps no ema; a run with train.ema=0.999 keeps ema",
        ),
        (("run.name=b", "init=runs/a@1", "init_step=1"), "names the step 1"),
        (("run.name=b", "train.ema=1"), "train.ema=1.0 must lie between 0 and 1"),
    ],
)
def test_weights_that_no_run_has_are_refused(
    cli: Cli, words: tuple[str, ...], message: str
) -> None:
    cli.trained("run.name=a", "train.steps=1", *STEADY)
    said = cli.raw(*words) if words[0] == "eval" else cli(*words)
    assert message in said.message


def test_a_folder_of_an_average_is_verified_against_that_of_its_own_step(cli: Cli) -> None:
    """The folder names them; a command that names others is heard."""
    cli.trained("run.name=a", "train.steps=3", *EVERY_STEP, *STEADY)
    assert cli.raw("export", "runs/a@2:ema", "to=hf", "out=out").code == 0
    verified = cli.raw("verify", "out", "against=runs/a")
    assert verified.code == 0 and "numbers of runs/a at step 2, ema" in verified.out
    assert cli.raw("verify", "out", "against=runs/a", "step=3").code == 1
    assert cli.raw("verify", "out", "against=runs/a:ema").code == 0
    assert cli.raw("verify", "out", "against=runs/a@2").code == 1, "the trained weights, by name"
