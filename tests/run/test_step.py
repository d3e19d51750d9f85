"""The path of a step: few frames from the loop to the model, nothing of what divides runs over ranks, and losses that
leave the caller's gradients as they are."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Before, Cli
from torch import nn

import fp4train
from fp4train.parallel.pipeline import Microbatch
from fp4train.run.step import losses

PACKAGE = str(Path(fp4train.__file__).parent)
LAYOUT = Path(PACKAGE).parent / "docs/layout.md"
DIVIDING = (
    "shards.py",
    "nn/ranks.py",
    "nn/executors/cut.py",
    *(f"parallel/{name}.py" for name in ("fsdp", "gather", "held", "pipeline", "received", "stages", "tensor")),
)
"""Files of which a run of one process calls nothing in a step."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return self.w * tokens_BT.sum()


def test_an_iteration_that_is_given_up_leaves_gradients_on() -> None:
    rows = torch.ones(2, 3)
    microbatches = [
        Microbatch(tokens_BT=rows, targets_BT=rows, context=nullcontext, dtype=torch.float32) for _ in range(3)
    ]
    found = losses(SimpleNamespace(model=Model(), pipeline=None), microbatches)  # type: ignore[arg-type]
    assert not next(found).requires_grad
    assert torch.is_grad_enabled(), "between two losses"
    with torch.no_grad():
        next(found)
    found.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled(), "after it was given up"


def test_from_the_loop_to_the_model_there_are_four_frames(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train`, `train_step`, the runner's `step`, and the losses."""
    from fp4train.models.llama.model import LlamaModel

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
    assert cli("run.name=a", "train.steps=1", "eval.every=0").code == 0
    assert stacks[0] == ["train_losses", "step", "train_step", "train"]


def test_an_undivided_step_reaches_the_kernel_in_seven_files_and_calls_nothing_of_what_divides_runs(
    cli: Cli, before: Before
) -> None:
    called: set[str] = set()
    to_kernel: list[str] = []

    def place(frame: FrameType) -> str:
        return str(Path(frame.f_code.co_filename).relative_to(PACKAGE))

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.add(f"{place(frame)}:{frame.f_code.co_name}")
        if event == "c_call" and not to_kernel and "_cpu" in str(getattr(argument, "__module__", "")):
            at: FrameType | None = frame
            while at is not None and (not to_kernel or to_kernel[-1] != "train.py"):
                if at.f_code.co_filename.startswith(PACKAGE) and place(at) not in to_kernel:
                    to_kernel.append(place(at))
                at = at.f_back

    assert not [name for name in DIVIDING if not (Path(PACKAGE) / name).is_file()]
    before(3, lambda run: sys.setprofile(note))
    before(4, lambda run: sys.setprofile(None))
    assert cli("run.name=a", "recipe=nvfp4", "train.steps=5", "phases=none", "policy=all").code == 0
    assert "run/step.py:step" in called
    shown = re.findall(
        r"`fp4train/([\w/.]+)`", LAYOUT.read_text(encoding="utf-8").partition("## The path of a step")[2]
    )
    files = {name.partition(":")[0] for name in called}
    assert len(shown) > 6 and set(shown) <= files, "the path that docs/layout.md shows"
    assert [name for name in shown if name in to_kernel] == [name for name in reversed(to_kernel) if name in shown]
    assert len([name for name in to_kernel if not name.startswith("models/")]) <= 7, to_kernel
    assert not {name for name in called if name.startswith(DIVIDING)}
