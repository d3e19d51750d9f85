"""Forks of rankings and gates that a function of a test makes."""

import os
import signal
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from command_line import PATIENCE
from forked import forked
from limits import set_limit

from fp4train.cli import main
from fp4train.lab.studies import forks

MakeFork = Callable[..., Any]


def forks_by(monkeypatch: pytest.MonkeyPatch, fork: MakeFork) -> MakeFork:
    """`fork(subject, branch, settings, number)` makes the forks from here on; returns the function
    that made them so far.
    """
    earlier = forks.fork
    monkeypatch.setattr(forks, "fork", fork)
    return earlier


def killed_after_forks(monkeypatch: pytest.MonkeyPatch, most: int, words: Sequence[str]) -> int:
    """The exit code of a process that runs the command `words` and kills itself when it has made
    `most` forks and begins another.
    """
    numbers = count()

    def kill(*arguments: Any) -> Any:
        if next(numbers) == most:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(*arguments)

    with monkeypatch.context() as patch:
        make = forks_by(patch, kill)
        # each fork is in the record before the next begins, also where the disk is slow
        set_limit(patch, "seconds for a line of metrics", PATIENCE)
        return forked(lambda: main(list(words)))
