"""Runs in published recipes: they resume in every bit and are ranked."""

import pytest
from command_line import Cli, losses

RESUMED = (
    "fp4_all_the_way",
    "mfu_operands",
    "deepseek_v4_qat",
    "ue5m3_fp4",
    "averis",
    "chon",
    "mfu_localcta",
)
"""Recipes with stochastic rounding of x, a format per product, codes that backward takes, held
scales, means, residuals, and scales of row tiles.
"""


@pytest.mark.parametrize("name", RESUMED)
def test_a_recipe_of_the_ledger_resumes_in_every_bit(cli: Cli, name: str) -> None:
    words = (f"recipe={name}", "policy=all", "phases=none", "schedule=constant")
    assert cli(*words, "run.name=whole", "train.steps=4").code == 0
    assert cli(*words, "run.name=a", "train.steps=2").code == 0
    assert cli("resume=runs/a", "train.steps=4").code == 0
    whole = losses("runs/whole")
    resumed = losses("runs/a")
    assert [resumed[step] for step in (3, 4)] == [whole[step] for step in (3, 4)]


def test_two_recipes_of_the_ledger_are_ranked(cli: Cli) -> None:
    cli.trained("run.name=a", "checkpoint.every=3")
    words = ("steps=1", "forks=2", "batches=1", "policy=all")
    shown = cli.raw("rank", "runs/a", "recipe=amd_mxfp4,w4a16_qat", *words)
    assert shown.code == 0 and "w4a16_qat" in shown.out
