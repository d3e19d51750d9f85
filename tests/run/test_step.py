"""The path of a step: few frames from the loop to the model, nothing of what divides runs over
ranks, and losses that leave the caller's gradients as they are.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Before, Cli
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
        *(
            pytest.param(family, (), marks=pytest.mark.long)
            for family in TINY_RUNS
            if family != "llama"
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
