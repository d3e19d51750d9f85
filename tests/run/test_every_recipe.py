"""Every recipe trains through the command line: in its own precision everywhere and to the end, the
loss falls.
"""

import pytest
from command_line import Cli, events, lines

from fp4train.config.overrides import groups


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_the_loss_falls_in_every_recipe(recipe: str, cli: Cli) -> None:
    ended = cli(
        f"recipe={recipe}",
        "run.name=a",
        "policy=all",
        "phases=none",
        "train.steps=30",
        "optim.lr=1e-2",
    )
    assert ended.code == 0, ended.err
    losses = [line["train/loss"] for line in lines("runs/a") if "train/loss" in line]
    assert len(losses) == 30
    assert not events("runs/a", "divergence")
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
