"""Several ranks go back together: the lead decides, and all act after the same step."""

import json
from typing import Any

import pytest

from fp4train import checkpoint

Ranks = Any

POISON = """
import torch
import fp4train.train as loop
original = loop.train_step
def train_step(run, recipe):
    if run.batch_index == 8:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(30)
    return original(run, recipe)
loop.train_step = train_step
"""
OPTIONS = (
    "recipe=nvfp4",
    "train.steps=16",
    "checkpoint.every=5",
    "checkpoint.keep=1",
    "eval.every=0",
    "phases=none",
    "schedule=constant",
    "schedule.warmup=0",
    "model.layers=4",
    "train.on_divergence=rewind",
)


@pytest.mark.long
@pytest.mark.parametrize(("cut", "microbatch"), [("dp_shard", 2), ("pp", 1)])
def test_two_ranks_go_back_after_the_same_step_as_one(
    ranks: Ranks, cut: str, microbatch: int
) -> None:
    options = (*OPTIONS, f"train.microbatch={microbatch}")
    ranks.train(2, "two", *options, f"parallel.{cut}=2", patch=POISON)
    records = [
        json.loads(line) for line in (ranks.run("two") / "history.jsonl").read_text().splitlines()
    ]
    assert [(r["step"], r["skipped"]) for r in records if r["event"] == "rewind"] == [(5, [5, 12])]
    assert [line["step"] for line in ranks.losses("two")] == list(range(1, 17))
    ranks.train(1, "one", *options, patch=POISON)
    ranks.same("one", "two")


@pytest.mark.long
def test_ranks_stop_with_one_message_and_leave_the_good_checkpoint(ranks: Ranks) -> None:
    said = ranks(2, "run.name=a", *OPTIONS, "train.on_divergence=stop", patch=POISON).message
    assert said.startswith("step 13: the loss is") and "resume=runs/a resume_step=5 " in said
    assert checkpoint.steps(ranks.run("a") / "checkpoints")[0] == 5
