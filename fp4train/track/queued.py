"""A tracker in a thread of its own, so that a service that stalls never stalls a step.

Calls are queued, and the thread carries them out. Every wait of the caller is bounded: a full queue drops lines (the
metrics log has them all), and a service that does not answer at the start or at the end is left behind. Its processes
are then ended, because they would keep the interpreter from exiting.
"""

import logging
from collections.abc import Callable

from fp4train.track.tracker import Relay, Tracker
from fp4train.worker import Worker

_log = logging.getLogger(__name__)

CAPACITY = 10_000


class Queued(Relay):
    """Carries out a tracker's calls in a thread.

    Args:
        start: makes the tracker; called in the thread.
        name: what messages call it.
        start_seconds: how long to wait for `start`; finish_seconds: for what is left in the queue at the end.
        abandon: called where the tracker does not answer; frees what would block the end of the process.

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
        self._finish_seconds, self._abandon = finish_seconds, abandon
        self._start = start
        self._raised: list[Exception] = []
        self._dropped, self._over = 0, False
        self._worker = Worker(name, self._failed, capacity=CAPACITY)
        self._worker.put(self._begin)
        if not self._worker.wait(start_seconds):
            self._over = True
            self._worker.leave()
            abandon()
            raise TimeoutError(f"it did not start within {start_seconds:g} s")
        if self._raised:
            self._worker.leave()
            raise self._raised[0]

    def finish(self, exit_code: int = 0) -> None:
        """Wait for what is queued, within bounds; a second call does nothing."""
        if not self._over:
            self._relay(lambda tracker: tracker.finish(exit_code))
            if not self._worker.leave(self._finish_seconds):
                _log.warning(
                    "%s does not answer and is left behind after %g s; the metrics log is whole",
                    self.name,
                    self._finish_seconds,
                )
                self._abandon()
        self._over = True
        if self._dropped:
            _log.warning(
                "%s was too slow: %d lines did not reach it; the metrics log is whole", self.name, self._dropped
            )
            self._dropped = 0

    def _relay(self, call: Callable[[Tracker], None]) -> None:
        def act() -> None:
            if self.inner is not None and not self._over:
                call(self.inner)

        if not self._over and not self._worker.put(act):
            if not self._dropped:
                _log.warning("%s does not keep up: lines are left out there, the metrics log has them", self.name)
            self._dropped += 1

    # -- the thread's ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.inner = self._start()

    def _failed(self, error: Exception) -> None:
        """Whatever a service's client may raise."""
        if self.inner is None:
            self._raised.append(error)
        elif not self._over:
            self._over = True
            _log.warning("%s failed and is switched off: %s", self.name, error)
            try:
                self.inner.finish(1)
            except Exception as second:
                _log.debug("%s could not be finished either: %s", self.name, second)
