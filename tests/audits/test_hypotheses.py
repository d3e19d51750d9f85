"""The cause of a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from limits import set_limit

from fp4train.audits.fault import first_fitting


def fails() -> bool:
    raise ValueError("a spec does not allow it")


def test_the_first_fault_that_fits_is_named_and_one_that_cannot_be_made_does_not() -> None:
    faults = [("a", fails), ("b", lambda: False), ("c", lambda: True), ("d", lambda: True)]
    assert first_fitting(faults) == "c"
    assert first_fitting(faults[:2]) == ""


def test_a_search_for_a_cause_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def endless() -> Iterator[tuple[str, Callable[[], bool]]]:
        while len(tried) < 100_000:
            tried.append(1)
            yield "slow", lambda: False

    set_limit(monkeypatch, "seconds to explain a difference", 0.01)
    assert first_fitting(endless()) == ""
    assert 0 < len(tried) < 100_000
