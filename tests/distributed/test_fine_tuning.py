"""Fine-tuning on several ranks: the loss of the answers and of a teacher does not depend on how the
work is cut.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from chunks import in_chunks

pytestmark = pytest.mark.long

Ranks = Any


@pytest.fixture
def chat(tmp_path: Path) -> tuple[str, ...]:
    """Conversations whose answers are of very different lengths, so that ranks have unlike numbers
    of targets.
    """
    lines = []
    for number in range(60):
        messages = [("user", f"{number}?"), ("assistant", "y" * (1 + number * 17 % 53))]
        lines.append(
            {"messages": [{"role": role, "content": content} for role, content in messages]}
        )
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return (
        "data=chat",
        f"data.path={path}",
        "data.val=0.2",
        "train.seq_len=256",
        "train.steps=3",
        "policy=all",
    )


def test_answers_count_alike_on_two_ranks_and_in_two_microbatches(
    ranks: Ranks, chat: tuple[str, ...]
) -> None:
    ranks.train(1, "one", *chat, "train.microbatch=2")
    ranks.train(2, "two", *chat)
    ranks.same("one", "two")


def test_answers_count_alike_in_chunks_of_two_ranks_and_of_one(
    ranks: Ranks, chat: tuple[str, ...]
) -> None:
    options = (*chat, "train.batch_size=2", "train.microbatch=2")
    ranks.train(1, "one", *options, patch=in_chunks(2))
    ranks.train(2, "two", *options, "parallel.cp=2")
    assert ranks.state("one") == ranks.state("two")
    for one, two in zip(ranks.losses("one"), ranks.losses("two"), strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-6)


def test_a_vocabulary_that_is_cut_leaves_out_the_same_targets(
    ranks: Ranks, chat: tuple[str, ...]
) -> None:
    heads = ("model.kv_heads=2", "recipe=fp32", "optim.clip=null")
    ranks.train(1, "one", *chat, *heads)
    ranks.train(2, "cut", *chat, *heads, "parallel.tp=2", "parallel.sp=false")
    for one, cut in zip(ranks.losses("one"), ranks.losses("cut"), strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert cut[key] == pytest.approx(one[key], rel=2e-4), (one["step"], key)


def test_a_teacher_teaches_two_ranks_as_two_microbatches(ranks: Ranks) -> None:
    ranks.train(1, "teacher", "recipe=bf16", "train.steps=3", "phases=none")
    given = (
        f"init={ranks.run('teacher')}",
        f"teacher={ranks.run('teacher')}",
        "recipe=nvfp4",
        "policy=all",
        "phases=none",
    )
    ranks.train(1, "one", *given, "train.microbatch=2")
    ranks.train(2, "two", *given)
    ranks.same("one", "two")
    exact = (*given, "recipe=fp32", "train.microbatch=4", "train.batch_size=4")
    ranks.train(1, "whole", *exact)
    ranks.train(2, "chunks", *exact, "parallel.cp=2")
    for whole, chunks in zip(ranks.losses("whole"), ranks.losses("chunks"), strict=True):
        assert chunks["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-3, abs=1e-7)
    refused = ranks(2, *given[1:], "run.name=cut", "model.kv_heads=2", "parallel.tp=2")
    assert "the loss needs the whole vocabulary and all blocks on a rank" in refused.message
