"""Hooks on two ranks: one that raises on one rank ends both before their next step, with the state
saved; one that is for the first rank alone is not on the other.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import steps

Ranks = Any

LAB = """from dataclasses import dataclass

from fp4train.companion import Companion

@dataclass(frozen=True, kw_only=True)
class Raises(Companion):
    moment: str

    def hear(self, run, moment):
        if moment == self.moment and run.world.place.rank == 1 and run.step >= 1:
            raise ValueError("no more")

    def after_step(self, run, step):
        self.hear(run, "after_step")

    def close(self, run, error):
        self.hear(run, "close")

@dataclass(frozen=True, kw_only=True)
class First(Companion):
    lead_only = True

    def after_step(self, run, step):
        with open(self.folder(run) / "ranks.txt", "a") as file:
            print(run.world.place.rank, file=file)
"""
OWN = ("--config-dir", "mine", "plugins=[ranklab]", "recipe=bf16", "phases=none", "run.name=a")


@pytest.fixture
def mine(ranks: Ranks) -> None:
    (ranks.folder / "mine").mkdir()
    (ranks.folder / "mine/ranklab.py").write_text(LAB)


@pytest.mark.parametrize(
    ("moment", "saved"), [("after_step", 2), pytest.param("close", 4, marks=pytest.mark.long)]
)
def test_a_hook_that_raises_on_one_rank_ends_both_with_the_state_saved(
    ranks: Ranks, mine: None, moment: str, saved: int
) -> None:
    ended = ranks(2, *OWN, f"hooks=[{{_target_: ranklab.Raises, moment: {moment}}}]")
    assert f"rank 1: {moment} of the hook ranklab.Raises raised ValueError" in ended.message
    assert ended.codes == [1, 1] and steps(ranks.folder / "runs/a") == [saved]


@pytest.mark.long
def test_a_hook_of_the_first_rank_is_on_no_other(ranks: Ranks, mine: None) -> None:
    hooks = "hooks=[{_target_: ranklab.First}]"
    ended = ranks(2, *OWN, hooks, "profile.steps=[2]", "profile.ranks=[1]")
    assert ended.codes == [0, 0], ended.err
    run = Path(ranks.folder, "runs/a")
    assert (run / "hooks/First/ranks.txt").read_text().split() == ["0"] * 4
    assert [path.name for path in (run / "profile").iterdir()] == ["steps_2-2_rank_1.json.gz"]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
