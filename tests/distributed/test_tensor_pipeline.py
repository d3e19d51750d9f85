"""Tensor parallelism on the stages of a pipeline: for a fixed number of tensor-parallel ranks
stages change no bit.
"""

import shutil
from typing import Any

import pytest

pytestmark = pytest.mark.long

Ranks = Any
TP = "parallel.tp=2"
BOTH = (TP, "parallel.pp=2")
SMALL = (
    "model.layers=4",
    "model.kv_heads=2",
    "train.microbatch=2",
    "policy=all",
    "train.steps=3",
    "eval.every=0",
)


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        (("recipe=nvfp4",), "1f1b"),
        (
            ("recipe=fp8_delayed", "parallel.sp=false", "model.tied=false", "model.recompute=true"),
            "interleaved",
        ),
    ],
    ids=["tokens are shared, tied head", "interleaved, recomputed"],
)
def test_stages_of_tensor_parallel_ranks_are_one_stage(
    ranks: Ranks, options: tuple[str, ...], schedule: str
) -> None:
    ranks.train(2, "one", *SMALL, *options, TP)
    ranks.train(4, "two", *SMALL, *options, *BOTH, f"parallel.pp_schedule={schedule}")
    ranks.same("one", "two")


def test_a_run_of_one_rank_goes_on_over_both_and_then_on_one_again(ranks: Ranks) -> None:
    """As it does over tensor-parallel ranks alone: no tensor of the checkpoint is lost or lies
    elsewhere.
    """
    runs = ranks.folder / "runs"
    ranks.train(1, "one", *SMALL, "recipe=nvfp4", "schedule=constant", "phases=none")
    shutil.copytree(runs / "one", runs / "two")
    for name, count, mesh in (("one", 2, (TP,)), ("two", 4, BOTH)):
        for ranks_then, steps, then in (
            (count, 4, mesh),
            (1, 5, ("parallel.tp=1", "parallel.pp=1")),
        ):
            ended = ranks(ranks_then, f"resume=runs/{name}", f"train.steps={steps}", *then)
            assert ended.codes == [0] * ranks_then, ended.err
    assert len(ranks.losses("two")) == 5
    ranks.same("one", "two")


def test_a_loss_that_is_not_finite_names_the_layer_where_it_began(ranks: Ranks) -> None:
    """Rank 3 holds blocks 1 and 3 and half of the tokens: ranks 0 and 1 see it in block 2, rank 2
    in block 3.
    """
    poison = """
import fp4train.train as loop
original = loop.train_step
def step(run, recipe):
    if run.step == 1 and rank == 3:
        layer = run.model.get_submodule("blocks.1.mlp.down")
        layer.register_forward_hook(lambda m, a, y: y * float("nan"))
    return original(run, recipe)
loop.train_step = step
"""
    ended = ranks(4, "run.name=a", *SMALL, *BOTH, "parallel.pp_schedule=interleaved", patch=poison)
    assert ended.message.startswith(
        "step 1: loss is nan in NVFP4; first non-finite: output of blocks.1.mlp.down"
    )
