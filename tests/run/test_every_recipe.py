"""Files of `recipes/` through the command line. A ranking takes each; in those that have all parts
between them, in low precision everywhere and to the end, the loss falls and a run goes on from a
checkpoint with the same bits.
"""

from pathlib import Path

import pytest
import torch
from command_line import Cli, events, lines, losses
from covering import COVERING
from lengths import long_but

from fp4train import checkpoint
from fp4train.config.overrides import groups

RECIPES = groups()["recipe"]
TRAINED = ("nvfp4", *COVERING)
SHORT = ("nvfp4", "quartet_ii")
"""The default, and rotations; `test_resume` resumes each kind of state."""
SAVED = 18
STEPS = 20


def weights_and_states(run: str) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint of a run."""
    return checkpoint.load(Path(run) / "checkpoints").tensors


@pytest.mark.parametrize("recipe", long_but(SHORT, TRAINED))
def test_the_loss_falls_in_recipes_of_every_part_and_a_run_resumes_to_the_bit(
    recipe: str, cli: Cli
) -> None:
    ended = cli(
        f"recipe={recipe}",
        "run.name=a",
        "policy=all",
        "phases=none",
        f"train.steps={STEPS}",
        "optim.lr=1e-2",
        f"checkpoint.every={SAVED}",
        "audit.every=null",
    )
    assert ended.code == 0, ended.err
    curve = [line["train/loss"] for line in lines("runs/a") if "train/loss" in line]
    assert len(curve) == STEPS
    assert not events("runs/a", "divergence")
    assert sum(curve[-5:]) < 0.75 * sum(curve[:5])
    resumed = cli("resume=runs/a", f"resume_step={SAVED}", "run.name=b")
    assert resumed.code == 0, resumed.err
    assert [event["step"] for event in events("runs/b", "resume")] == [SAVED]
    assert losses("runs/b") == losses("runs/a")
    ended_with = weights_and_states("runs/a")
    resumed_to = weights_and_states("runs/b")
    assert ended_with.keys() == resumed_to.keys()
    assert all(torch.equal(ended_with[name], resumed_to[name]) for name in ended_with)


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_one_ranking_takes_every_recipe(cli: Cli) -> None:
    cli.trained("run.name=a", "checkpoint.every=3")
    words = ("steps=1", "forks=1", "batches=1", "policy=all")
    shown = cli.raw("rank", "runs/a", f"recipe={','.join(RECIPES)}", *words)
    assert shown.code == 0, shown.err
    assert set(RECIPES) <= set(shown.out.replace(",", " ").split())
    assert "diverged" not in shown.out
