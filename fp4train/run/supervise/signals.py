"""A signal asks a run to end after its current step, so that it can save and close its trackers.

| signal | who sends it |
|---|---|
| SIGTERM, SIGINT, SIGQUIT | a person, a container, a job that is cancelled |
| SIGHUP | a terminal that is closed |
| SIGUSR1, SIGUSR2 | a scheduler, some time before the job's end (Slurm: --signal) |
| SIGXCPU | the system, when the limit of CPU time is reached, and every second after it |
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

AT_ONCE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""A second one of these acts as it would have outside."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""These say that there is little time left; to repeat them takes none away."""


class StopRequest:
    """`signal` is the number of the signal that came, or None."""

    signal: int | None = None


@contextmanager
def stop_on_signals(*, quietly: bool = False) -> Iterator[StopRequest]:
    """Turn the first such signal into a request; a second one of `AT_ONCE` acts as it would have outside.

    Args:
        quietly: say nothing about it (of several ranks, which all receive it, one does).
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    # Who ignores one of them (nohup, a shell's background) wants it ignored.
    before = {n: signal.getsignal(n) for n in (*AT_ONCE, *WARNINGS) if signal.getsignal(n) != signal.SIG_IGN}

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.signal is None:
            stop.signal = number
            text = f"\n{signal.Signals(number).name}: ending after this step; once more ends at once\n"
            with suppress(OSError):  # not through logging, which may be what the signal interrupted
                os.write(2, b"" if quietly else text.encode())
        for each in before.keys() & set(AT_ONCE):
            signal.signal(each, before[each])

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop.signal == signal.SIGHUP:
            _leave_closed_terminal()


def _leave_closed_terminal() -> None:
    """Send output nowhere whose terminal is gone: writing to it would be an error that hides how the run ended."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            gone = stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
            gone = gone and not os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
        except OSError:
            gone = True
        if gone:
            with suppress(OSError, ValueError):
                stream.flush()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
