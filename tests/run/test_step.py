"""The path of a step: few frames from the loop to the model, nothing of what divides runs over
ranks, and losses that leave the caller's gradients as they are.
"""

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Before, Cli, lines
from families import TINY_RUNS, tiny_run
from torch import nn

import fp4train
from fp4train.parallel.pipeline import Microbatch
from fp4train.run.step import losses

PACKAGE = str(Path(fp4train.__file__).parent)
DIVIDING = (
    "shards.py",
    "nn/ranks.py",
    "nn/executors/cut.py",
    *(
        f"parallel/{name}.py"
        for name in (
            "fsdp",
            "gather",
            "gather_amaxes",
            "gather_items",
            "held",
            "pipeline",
            "stages",
            "tensor",
        )
    ),
)
"""Files of which a run of one process calls nothing in a step or an evaluation. It does call its
`World`, parallel/world.py: that of one rank, whose sums over the ranks are what it is given.
"""
WHOLE = {
    "is_sharded",
    "check_lies_in",
    "shard_of",
    "__post_init__",
    "whole",
    "boxes",
    "local",
    "owned",
    "separate",
    "row_orders",
    "order_of",
    "like",
}
"""Functions of shards.py that a plain tensor meets, for which it is one box at offset 0."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return self.w * tokens_BT.sum()


def test_an_iteration_that_is_given_up_leaves_gradients_on() -> None:
    rows = torch.ones(2, 3)
    microbatches = [
        Microbatch(tokens_BT=rows, targets_BT=rows, context=nullcontext, dtype=torch.float32)
        for _ in range(3)
    ]
    found = losses(SimpleNamespace(model=Model(), pipeline=None), microbatches)  # type: ignore[arg-type]
    assert not next(found).requires_grad
    assert torch.is_grad_enabled(), "between two losses"
    with torch.no_grad():
        next(found)
    found.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled(), "after it was given up"


@pytest.mark.parametrize(
    "options", [(), ("eval.errors_every=1",)], ids=["a step", "a measured step"]
)
def test_from_the_loop_to_the_model_there_are_four_frames(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """`train`, `train_step`, the runner's `step`, and the losses."""
    from fp4train.models.llama import LlamaModel

    stacks: list[list[str]] = []
    original = LlamaModel.forward

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        stack: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (not stack or stack[-1] != "train"):
            if frame.f_code.co_filename.startswith(PACKAGE):
                stack.append(frame.f_code.co_name)
            frame = frame.f_back
        stacks.append(stack)
        return original(self, *arguments, **options)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    assert cli("run.name=a", "train.steps=1", "eval.every=0", *options).code == 0
    assert any("error/sqnr_db" in line for line in lines("runs/a")) is bool(options)
    assert stacks[0] == ["train_losses", "step", "train_step", "train"]


def place(frame: FrameType) -> str:
    return str(Path(frame.f_code.co_filename).relative_to(PACKAGE))


def test_a_step_reaches_the_kernel_in_nine_files(cli: Cli, before: Before) -> None:
    to_kernel: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if (
            event == "c_call"
            and not to_kernel
            and "_cpu" in str(getattr(argument, "__module__", ""))
        ):
            at: FrameType | None = frame
            while at is not None and (not to_kernel or to_kernel[-1] != "train.py"):
                if at.f_code.co_filename.startswith(PACKAGE) and place(at) not in to_kernel:
                    to_kernel.append(place(at))
                at = at.f_back

    before(3, lambda run: sys.setprofile(note))
    before(4, lambda run: sys.setprofile(None))
    assert cli("run.name=a", "recipe=nvfp4", "train.steps=5", "phases=none", "policy=all").code == 0
    assert len([name for name in to_kernel if not name.startswith("models/")]) <= 9, to_kernel


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", ("optim.moments=bfloat16",)),
        ("moe", ()),
        *(
            pytest.param(family, (), marks=pytest.mark.long)
            for family in TINY_RUNS
            if family != "moe"
        ),
    ],
)
def test_undivided_steps_and_evaluations_call_nothing_of_what_divides_runs(
    cli: Cli, before: Before, family: str, words: tuple[str, ...]
) -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.add(f"{place(frame)}:{frame.f_code.co_name}")

    assert not [name for name in DIVIDING if not (Path(PACKAGE) / name).is_file()]
    before(2, lambda run: sys.setprofile(note))
    before(3, lambda run: sys.setprofile(None))
    options = (
        *tiny_run(family, *words),
        "recipe=nvfp4",
        "phases=none",
        "policy=all",
        "eval.every=1",
        "eval.errors_every=1",
    )
    assert cli("run.name=a", "train.steps=4", "train.batch_size=2", *options).code == 0
    assert {"run/step.py:step", "run/step.py:losses"} <= called
    assert not {name for name in called if name.startswith(DIVIDING)}


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["nvfp4", "tetrajet_v2_outliers"])
def test_undivided_runs_call_nothing_of_what_divides_runs(
    cli: Cli, before: Before, recipe: str
) -> None:
    """From the command to its end: checks, build, steps, checkpoints, and a resume, which takes one
    over.

    Where it draws weights, and writes and reads checkpoints, which have one form however many ranks
    a run has, a run of one process is the case of one part: there, and for an optimizer of plain
    parameters, it calls shards.py, and nothing of it but what a plain tensor meets.
    """
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname.split(".<locals>")[0].rpartition(".")[2]
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and name != "<module>":
            called.add(f"{place(frame)}:{name}")

    small = ("train.batch_size=2", f"recipe={recipe}", "eval.every=2", "checkpoint.every=2")
    assert cli("run.name=warm", "train.steps=2", *small).code == 0  # imports, and bodies of classes
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        ended = [cli("run.name=a", "train.steps=4", *small), cli("resume=runs/a", "train.steps=6")]
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert [each.code for each in ended] == [0, 0]
    assert {
        "run/build.py:assemble",
        "run/state/base.py:saved_part",
        "checkpoint/writing.py:_own",
    } <= called
    divided = {name for name in called if name.startswith((*DIVIDING, "parallel/agree.py"))}
    assert divided <= {f"shards.py:{name}" for name in WHOLE}
