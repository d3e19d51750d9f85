"""What the training loop talks to, and the combination that keeps a failing service away from it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from fp4train.track.statistics import Statistics

SPREAD = ("sqnr_db", "underflow", "saturation", "kurtosis")
"""The statistics of operands that are shown as histograms."""

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives the numbers of one run."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers and short strings after `step` optimiser steps; keys as ``train/loss``."""

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        """Something that happened: ``swap``, ``resume``, ``phase``, ``guard``, ..."""

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """A table known at the start, as the plan."""

    def log_statistics(self, statistics: Statistics) -> None:
        """What a measured step found of every operand."""

    def finish(self, exit_code: int = 0) -> None:
        """End the run, within seconds; a second call does nothing."""


class Relay(ABC):
    """A tracker that hands all calls on."""

    @abstractmethod
    def _relay(self, call: Callable[[Tracker], None]) -> None: ...

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        kept = dict(values)
        self._relay(lambda tracker: tracker.log(step, kept))

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        kept = dict(values or {})
        self._relay(lambda tracker: tracker.log_event(step, event, kept))

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._relay(lambda tracker: tracker.log_table(name, columns, rows))

    def log_statistics(self, statistics: Statistics) -> None:
        self._relay(lambda tracker: tracker.log_statistics(statistics))

    def finish(self, exit_code: int = 0) -> None:
        self._relay(lambda tracker: tracker.finish(exit_code))


def spreads(statistics: Statistics) -> Iterator[tuple[str, Any]]:
    """The finite values of each statistic of `SPREAD` that has some, over layers and operands."""
    for name in SPREAD:
        values = statistics.operands[name]
        if len(finite := values[np.isfinite(values)]):
            yield name, finite


class NullTracker(Relay):
    """Keeps nothing."""

    def _relay(self, call: Callable[[Tracker], None]) -> None: ...


class Trackers(Relay):
    """One tracker that matters and others beside it.

    What the first raises reaches the caller. One of the others that raises is reported once and left out from then on.
    """

    def __init__(self, first: Tracker, *others: Tracker) -> None:
        self._first = first
        self._others = list(others)

    def _relay(self, call: Callable[[Tracker], None]) -> None:
        call(self._first)
        self._each(call)

    def finish(self, exit_code: int = 0) -> None:
        try:
            self._first.finish(exit_code)
        finally:
            self._each(lambda tracker: tracker.finish(exit_code))

    def mark(self) -> dict[str, int | str] | None:
        """What the first one has written by now, see `MetricsLog.mark`."""
        return mark(self._first)

    def sync(self) -> None:
        """Make what the first one has written durable."""
        sync(self._first)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._others):
            try:
                call(tracker)
            except Exception as error:  # whatever a service's client may raise
                self._others.remove(tracker)
                _log.warning("%s failed and is switched off: %s", type(tracker).__name__, error)
                try:
                    tracker.finish(1)
                except Exception as second:
                    _log.debug("%s could not be finished either: %s", type(tracker).__name__, second)


def mark(tracker: Tracker) -> dict[str, int | str] | None:
    """What a checkpoint should remember of a tracker's file; None where it has none."""
    found: dict[str, int | str] | None = tracker.mark() if hasattr(tracker, "mark") else None
    return found


def sync(tracker: Tracker) -> None:
    """Make a tracker's file durable, where it has one.

    Raises:
        OSError: the disk does not take it.
    """
    if hasattr(tracker, "sync"):
        tracker.sync()
