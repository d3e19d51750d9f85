"""The tracker that the training loop logs to. Services beside the metrics are kept away from it:
none stalls or ends a run.

`Trackers` leaves a service out that fails. `QueuedTracker` calls one in a thread of its own: every
wait of the caller is bounded, a full queue drops lines (the metrics log has them all), and a
service that does not answer at the start or at the end is left behind. Its processes are then
ended, because they would keep the interpreter from exiting.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from fp4train.track.statistics import Statistics
from fp4train.worker import Worker

SPREAD = ("sqnr_db", "underflow", "saturation", "kurtosis")
"""The statistics of operands that are shown as histograms."""

_log = logging.getLogger(__name__)

CAPACITY = 10_000


class Tracker(Protocol):
    """Receives the numbers of one run."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers and short strings after `step` optimiser steps; keys as ``train/loss``."""

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        """Something that happened: ``swap``, ``resume``, ``phase``, ``guard``, ..."""

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """A table known at the start, as the plan."""

    def log_statistics(self, statistics: Statistics) -> None:
        """Statistics of every operand in a measured step."""

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
    """One tracker that matters, and services beside it.

    What the main tracker raises reaches the caller. A service that raises is reported once and left
    out from then on.
    """

    def __init__(self, main: Tracker, *services: Tracker) -> None:
        self._main = main
        self._services = list(services)

    def mark(self) -> dict[str, int | str] | None:
        """The mark of the main tracker's file, see `MetricsLog.mark`."""
        return mark(self._main)

    def sync(self) -> None:
        """Make what the main tracker has written durable."""
        sync(self._main)

    def _relay(self, call: Callable[[Tracker], None]) -> None:
        try:
            call(self._main)
        finally:
            for tracker in list(self._services):
                try:
                    call(tracker)
                except Exception as error:  # whatever a service's client may raise
                    self._services.remove(tracker)
                    _switch_off(tracker, type(tracker).__name__, error)


class QueuedTracker(Relay):
    """Carries out a tracker's calls in a thread.

    Args:
        start: function that makes the tracker; called in the thread.
        name: its name in messages.
        start_seconds: seconds to wait for `start`.
        finish_seconds: seconds to wait at the end for what is left in the queue.
        abandon: function that is called where the tracker does not answer; frees what would block
            the end of the process.

    Raises:
        TimeoutError: `start` did not return in time.
        Exception: whatever `start` raised.
    """

    def __init__(
        self,
        start: Callable[[], Tracker],
        name: str,
        *,
        start_seconds: float,
        finish_seconds: float,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.inner: Tracker | None = None
        self._start = start
        self._finish_seconds = finish_seconds
        self._abandon = abandon
        self._raised: list[Exception] = []
        self._dropped = 0
        self._over = False
        self._worker = Worker(name, self._failed, capacity=CAPACITY)
        self._worker.put(self._begin)
        in_time = self._worker.wait(start_seconds)
        if in_time and not self._raised:
            return
        self._over = True
        self._worker.leave()
        if in_time:
            raise self._raised[0]
        abandon()
        raise TimeoutError(f"it did not start within {start_seconds:g} s")

    def finish(self, exit_code: int = 0) -> None:
        """Wait for what is queued, within bounds; a second call does nothing."""
        if not self._over:
            super().finish(exit_code)
            if not self._worker.leave(seconds := self._finish_seconds):
                text = "%s does not answer and is left behind after %g s; the metrics log is whole"
                _log.warning(text, self.name, seconds)
                self._abandon()
        self._over = True
        if self._dropped:
            text = "%s was too slow: %d lines did not reach it; the metrics log is whole"
            _log.warning(text, self.name, self._dropped)
            self._dropped = 0

    def _relay(self, call: Callable[[Tracker], None]) -> None:
        def act() -> None:
            if self.inner is not None and not self._over:
                call(self.inner)

        if not self._over and not self._worker.put(act):
            if not self._dropped:
                _log.warning(
                    "%s does not keep up: lines are left out there, the metrics log has them",
                    self.name,
                )
            self._dropped += 1

    # -- the thread's ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.inner = self._start()

    def _failed(self, error: Exception) -> None:
        """Keep an error of a service's client that has not begun; switch off one that has, at its
        first error.
        """
        if self.inner is None:
            self._raised.append(error)
        elif not self._over:
            _switch_off(self.inner, self.name, error)
            self._over = True  # from now on `finish` has nothing to wait for


def _switch_off(tracker: Tracker, name: str, error: Exception) -> None:
    _log.warning("%s failed and is switched off: %s", name, error)
    try:
        tracker.finish(1)
    except Exception as finish_error:
        _log.debug("%s could not be finished either: %s", name, finish_error)


def mark(tracker: Tracker) -> dict[str, int | str] | None:
    """Bytes and checksum of a tracker's file, which a checkpoint remembers; None where it has no
    file.
    """
    if not hasattr(tracker, "mark"):
        return None
    file_mark: dict[str, int | str] | None = tracker.mark()
    return file_mark


def sync(tracker: Tracker) -> None:
    """Make a tracker's file durable, where it has one.

    Raises:
        OSError: the disk does not take it.
    """
    if hasattr(tracker, "sync"):
        tracker.sync()
