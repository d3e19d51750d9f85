"""The host waits for no number of a step before the whole step is queued, and reads it when the
next one is.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from command_line import Cli, around_steps, losses
from lengths import long_but
from pretended import Machine
from torch.utils._python_dispatch import TorchDispatchMode

import fp4train.train as loop
from fp4train.backends import emulate
from fp4train.optim.adamw import AdamW
from fp4train.run.queued import Numbers

STEADY = ("phases=none", "schedule=constant", "schedule.warmup=0")
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2")
"""Operators whose result the host needs: each makes it wait for a GPU."""


class Waiting(TorchDispatchMode):
    """Counts the operators of `WAITS` while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each step of the runs to come waits for."""
    found = []

    def around(run: Any, step: Callable[[], Any]) -> Any:
        with Waiting() as mode:
            values = step()
        found.append(mode.seen)
        return values

    around_steps(monkeypatch, around)
    return found


def test_the_counter_sees_a_number_that_is_read() -> None:
    with Waiting() as mode:
        float(torch.ones(2).sum())
        bool(torch.ones(()) > 0)
    assert mode.seen == ["_local_scalar_dense", "_local_scalar_dense"]


RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed", "fp16", "nvfp4_unbiased")


@pytest.mark.parametrize("recipe", long_but(("nvfp4", "fp8_delayed", "fp16"), RECIPES))
def test_a_step_is_queued_without_reading_a_number(
    cli: Cli, waits: list[list[str]], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    # A product on a CPU with BF16 instructions takes its scale as a host number; this is the one of
    # other devices.
    Machine(monkeypatch).lacks_instructions_for(torch.bfloat16, torch.float16)
    monkeypatch.setattr(emulate, "_of_tensors", emulate.queued_factors)
    options = ("policy=all", "train.steps=2", "train.microbatch=2", *STEADY)
    cli("run.name=tried", f"recipe={recipe}", *options)  # kernels are tried at their first use
    waits.clear()
    assert cli("run.name=a", f"recipe={recipe}", *options).code == 0
    assert waits == [[], []]


def test_an_optimizer_without_a_gate_waits_once_and_trains_the_same(
    cli: Cli, waits: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("run.name=gated", "recipe=bf16", *STEADY).code == 0
    assert waits == [[]] * 6
    build = AdamW.build

    def ungated(self: AdamW, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = build(self, model)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return optimizer

    monkeypatch.setattr(AdamW, "build", ungated)
    waits.clear()
    assert cli("run.name=waiting", "recipe=bf16", *STEADY).code == 0
    assert waits == [["_local_scalar_dense"]] * 6
    assert losses("runs/waiting") == losses("runs/gated")


def test_numbers_are_read_one_step_late_and_at_once_where_something_depends_on_them(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []

    def noting(name: str, original: Any) -> Any:
        def call(run: Any, *rest: Any, **options: Any) -> Any:
            log.append((name, run.step))
            return original(run, *rest, **options)

        return call

    read = Numbers.read

    def reading(self: Numbers) -> list[float]:
        if id(self) not in seen:
            seen.append(id(self))
            kept.append(self)  # an object that is gone may leave its number to another
            log.append("read")
        return read(self)

    seen: list[int] = []
    kept: list[Numbers] = []
    monkeypatch.setattr(Numbers, "read", reading)
    for name in ("train_step", "evaluate", "save"):
        monkeypatch.setattr(loop, name, noting(name, getattr(loop, name)))
    assert (
        cli("run.name=a", "train.steps=5", "eval.every=3", "checkpoint.every=4", *STEADY).code == 0
    )
    assert log == [
        *(("train_step", 0), ("train_step", 1), "read"),
        *(("train_step", 2), "read", "read", ("evaluate", 3)),
        *(("train_step", 3), "read", ("save", 4)),
        *(("train_step", 4), "read", ("evaluate", 5), ("save", 5)),
    ]


def test_a_step_that_fails_changes_nothing_although_the_next_one_is_queued(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []

    def around(run: Any, step: Callable[[], Any]) -> Any:
        weights.append([p.detach().clone() for p in run.model.parameters()])
        if run.step == 2:
            next(run.model.parameters()).register_hook(lambda grad: grad * torch.nan)
        values = step()
        run_of.append(run)
        return values

    run_of: list[Any] = []
    around_steps(monkeypatch, around)
    assert "step 2: gradient norm is nan" in cli("run.name=a", *STEADY).message
    assert len(weights) == 4, "steps 0, 1, 2 and the one queued after it"
    after = list(run_of[0].model.parameters())
    assert run_of[0].step == 2
    assert all(torch.equal(p, q) for p, q in zip(weights[2], after, strict=True))
    steps = {float(state["step"]) for state in run_of[0].optimizer.state.values()}
    assert steps == {2.0}, "AdamW counts the steps that it took"
