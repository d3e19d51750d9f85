"""Evaluations over ranks: each held-out sequence once, where a rank has no pass left, too."""

from typing import Any

import pytest

Ranks = Any

SEVEN_SEQUENCES = (
    "recipe=fp32",
    "policy=all",
    "data.val=225",
    "eval.batches=32",
    "train.steps=1",
    "optim.lr=1e-12",
    "model.kv_heads=2",
)
"""Of 32 tokens each: passes of 4, 2 and 1 of them on two ranks."""


@pytest.mark.long
def test_one_rank_judges_the_last_checkpoint_and_the_other_waits(ranks: Ranks) -> None:
    ranks.train(
        2, "a", "train.steps=2", "eval.command=sleep 3 && echo {step}", "parallel.timeout=2"
    )
    assert (ranks.run("a") / "judged/step_2.log").read_text() == "2\n"


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        *[
            pytest.param(
                2,
                ("parallel.dp_shard=2", f"train.batch_size={batch}"),
                marks=[pytest.mark.long] * (batch != 2),
            )
            for batch in (2, 16)
        ],
        pytest.param(2, ("parallel.dp_shard=2",), marks=pytest.mark.long),
        pytest.param(2, ("parallel.tp=2",), marks=pytest.mark.long),
        pytest.param(2, ("parallel.pp=2", "train.microbatch=4"), marks=pytest.mark.long),
        pytest.param(4, ("parallel.dp_shard=4",), marks=pytest.mark.long),
        pytest.param(4, ("parallel.pp=2", "train.microbatch=2"), marks=pytest.mark.long),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_ranks_evaluate_the_held_out_sequences_of_one(
    ranks: Ranks, count: int, mesh: tuple[str, ...]
) -> None:
    batch = () if any("batch_size" in word for word in mesh) else ("train.batch_size=8",)
    ranks.train(count, "cut", *SEVEN_SEQUENCES, *batch, *mesh)
    one = ranks.reference(*SEVEN_SEQUENCES, "train.batch_size=1")
    (cut,) = ranks.losses("cut")
    (whole,) = ranks.losses(one)
    assert cut["val/loss"] == pytest.approx(whole["val/loss"], abs=1e-6)
