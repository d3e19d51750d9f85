"""Speed and utilisation: known tokens, known FLOP, a known peak and a clock that the test sets give
known figures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4train.parallel.world import World
from fp4train.precision import NVFP4, Recipe
from fp4train.run.queued import Numbers, Step, Values
from fp4train.run.run import Run
from fp4train.run.supervise.ledger import Progress

MULTIPLIED = 29_696


def run_on(device: str) -> Run:
    """A run on `device`, as far as its peak is concerned."""
    blank = dict.fromkeys(field.name for field in fields(Run) if field.init)
    known = {
        "multiplied": MULTIPLIED,
        "data": SimpleNamespace(training=SimpleNamespace(vocab_size=257)),
        "world": World(device=torch.device(device)),
    }
    return Run(**blank | known)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that `Progress` sees, in seconds."""
    clock = SimpleNamespace(now=50.0)
    for module in ("supervise.ledger", "queued"):
        monkeypatch.setattr(
            f"fp4train.run.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now)
        )
    return clock


@contextmanager
def progress_of(
    step: int, steps: int, *, tokens: int, peak: float | None = None, ranks: int = 1
) -> Iterator[Progress]:
    """The display of a run with these numbers."""
    run: Any = SimpleNamespace(
        step=step,
        config=SimpleNamespace(train=SimpleNamespace(steps=steps, step_tokens=tokens)),
        world=SimpleNamespace(size=ranks, lead=True),
        peak_tokens_per_s=lambda: peak,
    )
    progress = Progress(run)
    progress.begin(run)
    yield progress
    progress.close(run, None)


def advanced(progress: Progress, step: Step) -> Values:
    """The numbers that a step adds to a line of metrics."""
    values: Values = {}
    progress.on_numbers(progress.run, step, values)
    return values


def step_at(clock: SimpleNamespace, recipe: Recipe | None = None) -> Step:
    """A step of a recipe (NVFP4 without one) whose numbers are known now."""
    numbers = Numbers(torch.tensor([2.0, 0.0]))
    return Step(index=0, recipe=recipe or NVFP4(), numbers=numbers, names=[], values={})


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 80GB HBM3", 989.5e12), ("NVIDIA B200", 2250e12)]
)
def test_the_peak_is_bf16s_over_six_flop_a_multiplication(
    name: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert run_on("cuda").peak_tokens_per_s() == pytest.approx(peak / (6 * MULTIPLIED), rel=1e-12)


def test_without_a_known_peak_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 2080")
    assert run_on("cuda").peak_tokens_per_s() is None and run_on("cpu").peak_tokens_per_s() is None


def test_mfu_is_the_speed_of_a_step_over_the_peak(clock: SimpleNamespace) -> None:
    with progress_of(0, 10, tokens=1000, peak=8000.0) as progress:
        clock.now += 0.5
        assert advanced(progress, step_at(clock)) == {
            "perf/tokens_per_s": 2000.0,
            "perf/mfu": 0.25,
        }
        clock.now += 0.25
        assert advanced(progress, step_at(clock))["perf/mfu"] == 0.5, (
            "of this step, not a mean over several"
        )
    with progress_of(0, 10, tokens=1000) as progress:
        clock.now += 0.5
        assert advanced(progress, step_at(clock)) == {"perf/tokens_per_s": 2000.0}


def test_what_happens_between_steps_is_not_counted(clock: SimpleNamespace) -> None:
    with progress_of(0, 10, tokens=1000, peak=8000.0) as progress:
        clock.now += 0.5
        advanced(progress, step_at(clock))
        clock.now += 100.0  # an evaluation
        progress.after_evaluation(progress.run, {})
        progress.before_step(progress.run)
        clock.now += 0.5
        assert advanced(progress, step_at(clock))["perf/mfu"] == 0.25
