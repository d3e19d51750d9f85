"""Fixtures of whole runs; see `command_line`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import gpu_stand_ins
import pytest
from command_line import Before, StopAt, before_steps


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> StopAt:
    """`stop_at(4)`: the next run dies without a word as step 4 begins, as if by kill -9;
    `stop_at(-1)`: none does.
    """
    where = [-1]

    def act(run: Any) -> None:
        if run.step == where[0]:
            raise SystemExit(137)

    before_steps(monkeypatch, act)

    def choose(step: int) -> None:
        where[0] = step

    return choose


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """`before(3, act)`: `act(run)` is called as step 3 begins."""
    acts: dict[int, Callable[[Any], Any]] = {}
    before_steps(monkeypatch, lambda run: acts.pop(run.step, lambda run: None)(run))
    return acts.__setitem__


@pytest.fixture
def recorded() -> Iterator[Callable[[bool], list[Any]]]:
    """`recorded(True)`: the steps of the runs that follow are recorded on the CPU; what recorded
    them. `recorded(False)`: they are not, and use the same kernels."""
    with ExitStack() as stack:

        def turn(wanted: bool) -> list[Any]:
            stack.close()
            found: list[Any] = stack.enter_context(gpu_stand_ins.graphs(recorded=wanted))
            return found

        yield turn
