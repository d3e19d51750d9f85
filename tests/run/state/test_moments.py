"""What an optimizer of a plugin keeps beside the state of its parameters: in its groups of
parameters, and under keys of its own.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import STEADY, Cli, losses
from lengths import long_but

from fp4train import checkpoint
from fp4train.run.state.moments import placed

LAB = """
from dataclasses import dataclass

import torch


class Counting(torch.optim.Optimizer):
    def __init__(self, parameters, lr, beside):
        super().__init__(parameters, dict(lr=lr, count=0, factor=torch.tensor(1.0)))
        self.beside = beside
        if beside:
            self.state["all"] = {"count": 0}

    @torch.no_grad()
    def step(self, closure=None):
        if self.beside:
            self.state["all"]["count"] += 1
        for group in self.param_groups:
            group["count"] += 1
            group["factor"] *= 0.75
            count = self.state["all"]["count"] if self.beside else group["count"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                rate = group["lr"] * group["factor"].item() / (count + state["count"])
                parameter.add_(parameter.grad, alpha=-rate)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 0.5
    clip: float | None = None
    beside: bool = False

    def build(self, model):
        return Counting(model.parameters(), self.lr, self.beside)
"""
COUNTING = ("--config-dir", "mine", "plugins=[countlab]", "optim=counting")
SHORT = (*STEADY, "recipe=bf16", "train.steps=4", "checkpoint.every=1", "checkpoint.keep=4")


@pytest.fixture(autouse=True)
def mine(cli: Cli) -> Iterator[None]:
    Path("mine/optim").mkdir(parents=True)
    Path("mine/countlab.py").write_text(LAB)
    Path("mine/optim/counting.yaml").write_text("_target_: countlab.Optimizer\n")
    yield
    sys.modules.pop("countlab", None)


def saved(run: str, step: int) -> checkpoint.Checkpoint:
    return checkpoint.load(Path(run, "checkpoints"), step)


@pytest.mark.parametrize(
    "beside", long_but(["true"], ["false", "true"]), ids=["in groups", "under a key of its own"]
)
def test_what_an_optimizer_counts_goes_on_in_a_resume(cli: Cli, beside: str) -> None:
    assert cli(*COUNTING, *SHORT, "run.name=a", f"optim.beside={beside}").code == 0
    resumed = cli(*COUNTING[:3], "resume=runs/a", "resume_step=2", "run.name=b")
    assert resumed.code == 0
    assert losses("runs/b").items() >= {(3, losses("runs/a")[3]), (4, losses("runs/a")[4])}
    first, second = saved("runs/a", 4), saved("runs/b", 4)
    assert first.state["optimizer"] == second.state["optimizer"]
    assert set(first.tensors) == set(second.tensors)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


@pytest.mark.long
def test_constants_of_an_optimizer_that_counts_may_change(cli: Cli) -> None:
    """What it did not change itself is the command's."""
    assert cli(*COUNTING, *SHORT, "run.name=a").code == 0
    words = ("resume=runs/a", "resume_step=2", "run.name=b", "optim.lr=0.25")
    assert cli(*COUNTING[:3], *words).code == 0
    entries = saved("runs/b", 4).state["optimizer"]
    assert isinstance(entries, dict)
    assert {entry["param_group"]["count"] for entry in entries.values()} == {4}  # type: ignore[index,call-overload]
    assert losses("runs/b")[4][2] == 0.25


def test_a_checkpoint_without_what_an_optimizer_keeps_beside_is_refused(cli: Cli) -> None:
    assert cli(*COUNTING, *SHORT, "run.name=a").code == 0
    words = ("resume=runs/a", "resume_step=2", "run.name=b", "optim.beside=true")
    message = cli(*COUNTING[:3], *words).message
    assert "does not fit this model: it lacks what the optimizer keeps under 'all'" in message


def test_tensors_of_an_optimizer_go_where_the_built_one_has_them() -> None:
    """Those that it makes later go to the run's device, but for numbers."""
    there = torch.device("meta")
    saved = {
        "mean": torch.ones(3),
        "history": [torch.ones(()), 7],
        "later": (torch.ones(2), torch.ones(())),
    }
    built = {"mean": torch.zeros(3), "history": [torch.zeros((), device=there)]}
    tensors = placed(saved, built, there)
    devices = [tensors["mean"], tensors["history"][0], *tensors["later"]]
    assert [tensor.device.type for tensor in devices] == ["cpu", "meta", "meta", "cpu"]
    assert tensors["history"][1] == 7 and tensors["mean"] is not saved["mean"]
