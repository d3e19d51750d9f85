"""Several ranks go back together: the lead decides, and all act after the same step."""

import json
from typing import Any

import pytest
from command_line import marked

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
@pytest.mark.parametrize("cut", ["dp_shard", "pp"])
def test_ranks_stop_with_one_message_and_mark_all_but_the_good_checkpoint(
    ranks: Ranks, cut: str
) -> None:
    options = (*OPTIONS, f"parallel.{cut}=2", f"train.microbatch={2 if cut == 'dp_shard' else 1}")
    ended = ranks(2, "run.name=a", *options, "train.on_divergence=stop", patch=POISON)
    assert ended.codes == [3, 3]
    said = ended.message
    assert said.startswith("step 13: the loss is") and "resume=runs/a resume_step=5 " in said
    saved = checkpoint.steps(ranks.run("a") / "checkpoints")
    assert saved[0] == 5 and sorted(marked(ranks.run("a"))) == saved[1:] != []


@pytest.mark.long
def test_ranks_that_train_on_end_with_the_code_of_a_diverged_run(ranks: Ranks) -> None:
    options = (*OPTIONS, "train.on_divergence=warn", "parallel.dp_shard=2", "train.microbatch=2")
    ended = ranks(2, "run.name=a", *options, patch=POISON)
    assert ended.codes == [3, 3] and "diverged: the validation loss is" in ended.out[0]
    again = ranks(2, "run.name=a", *options, patch=POISON)
    assert again.codes == [3, 3] and again.err[0].count("is doubtful") == 1
