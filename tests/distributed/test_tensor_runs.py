"""Tensor parallelism from the command line: the losses of one rank, resumes on other meshes,
refusals.
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

Ranks = Any
BASE = ("model.kv_heads=2", "policy=all", "schedule.warmup=0")


def close(ranks: Ranks, one: Path, other: str, first: float, later: float) -> None:
    """Relative differences of losses and norms, of the first step and of the others."""
    pairs = list(zip(ranks.losses(one), ranks.losses(other), strict=True))
    assert len(pairs) >= 4
    for number, (a, b) in enumerate(pairs):
        assert b["train/loss"] == pytest.approx(
            a["train/loss"], rel=1e-6 if number == 0 else later
        ), number
        assert b["train/grad_norm"] == pytest.approx(
            a["train/grad_norm"], rel=first if number == 0 else later
        ), number


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_two_tensor_parallel_ranks_give_the_losses_of_one_in_fp32(
    ranks: Ranks, sequence: str
) -> None:
    ranks.train(2, "two", "recipe=fp32", *BASE, "parallel.tp=2", f"parallel.sp={sequence}")
    close(ranks, ranks.reference("recipe=fp32", *BASE), "two", 1e-6, 1e-5)


def test_two_tensor_parallel_ranks_give_the_first_loss_of_one_in_nvfp4(ranks: Ranks) -> None:
    """The codes are equal; a few BF16 roundings of sums in another order spread from there."""
    ranks.train(2, "two", "recipe=nvfp4", *BASE, "parallel.tp=2")
    close(ranks, ranks.reference("recipe=nvfp4", *BASE), "two", 2e-4, 2e-2)


def test_a_run_goes_on_with_and_without_tensor_parallel_ranks_and_shards(ranks: Ranks) -> None:
    """FP32, so that what is compared is the state that travels and not the roundings of 4 bits."""
    constant = ("recipe=fp32", *BASE, "schedule=constant", "phases=none")
    ranks.train(2, "parts", *constant, "train.steps=2", "parallel.tp=2")
    ended = ranks(4, "resume=runs/parts", "train.steps=4", "parallel.tp=2", "parallel.dp_shard=2")
    assert ended.codes == [0] * 4, ended.err
    close(ranks, ranks.reference(*constant, "train.steps=4"), "parts", 1e-6, 1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("parallel.tp=2",), "model.kv_heads=1 cannot be divided over parallel.tp=2"),
        (("parallel.tp=2", "model.kv_heads=2", "eval.errors_every=2"), "measures whole operands"),
        (
            ("parallel.tp=2", "model.kv_heads=2", "train.microbatch=1", "train.seq_len=31"),
            "parallel.sp=false",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    ranks: Ranks, options: tuple[str, ...], said: str
) -> None:
    ended = ranks(2, "run.name=a", *options)
    assert set(ended.codes) == {1}
    assert said in ended.err[0] and "Traceback" not in ended.err[0]
