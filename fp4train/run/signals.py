"""SIGTERM, SIGINT and SIGHUP ask a run to end after its current step, so that it can save and close its trackers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class StopRequest:
    """`signal` is the number of the signal that came, or None."""

    signal: int | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first such signal into a request; a second one acts as it would have outside."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    # Who ignores one of them (nohup, a shell's background) wants it ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        with suppress(OSError):  # not through logging, which may be what the signal interrupted
            os.write(2, f"\n{signal.Signals(number).name}: ending after this step; once more ends at once\n".encode())
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
