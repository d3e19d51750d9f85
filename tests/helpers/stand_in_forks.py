"""Forks of rankings and gates that a function of a test makes."""

from collections.abc import Callable
from typing import Any

import pytest

from fp4train.lab.studies import forks

MakeFork = Callable[..., Any]


def forks_by(monkeypatch: pytest.MonkeyPatch, fork: MakeFork) -> MakeFork:
    """`fork(subject, branch, settings, number)` makes the forks from here on; returns the function
    that made them so far.
    """
    earlier = forks.fork
    monkeypatch.setattr(forks, "fork", fork)
    return earlier
