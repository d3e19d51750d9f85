"""A thread that does what may stall (a disk, a service) in the order it is given, so that its
caller never has to wait.

Whoever gives it something may wait for it, within bounds, and go on without it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

IDLE_SECONDS = 5.0
"""A thread that is given nothing for so long ends; the next call begins another."""


def within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """`ask()`, or `otherwise` if that fails or takes longer."""
    answers: list[T] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else otherwise


class Worker:
    """A background thread that does one call after another and exits when idle.

    A call that raises is reported to `failed`, in the thread, and the next one follows.

    Args:
        name: name of the thread.
        failed: function that takes the exception of a call.
        capacity: number of calls that may wait; None: any number.
    """

    def __init__(
        self, name: str, failed: Callable[[Exception], None], *, capacity: int | None = None
    ) -> None:
        self.name = name
        self._failed = failed
        self._capacity = capacity
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = self._leaving = False
        self._thread: threading.Thread | None = None

    @property
    def open(self) -> int:
        """Calls that are not done."""
        with self._changed:
            return len(self._calls) + self._busy

    def put(self, call: Callable[[], None]) -> bool:
        """Have `call` done after what was given before; False if too many wait, or it is left."""
        with self._changed:
            if self._leaving or (self._capacity is not None and len(self._calls) >= self._capacity):
                return False
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until all that was given is done; whether it is, at most `seconds` later."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._calls and not self._busy, seconds)

    def leave(self, seconds: float = 0.0) -> bool:
        """Take no more calls and wait for the end of the thread; whether it came. What waits is
        left undone then.
        """
        deadline = time.monotonic() + seconds
        done = self.wait(seconds)
        with self._changed:
            self._leaving = True
            if not done:
                self._calls.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and done:
            thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._leaving, IDLE_SECONDS)
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
                self._busy = True
            try:
                call()
            except Exception as error:
                self._failed(error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()
