"""A thread that watches a run from inside, so that nothing outside can stall a step.

It writes RUN/heartbeat.json, by which others see that the run lives, and looks whether the run's
directory is still where it was and still locked by this process. The loop reads what it found. Of
several ranks the lead watches.

A step cannot do without its tokens. Where they are waited for, the thread says so; `Alarm` ends the
run in the end.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fp4train.companion import RunCompanion
from fp4train.files import NotPlain
from fp4train.run.record.directory import HEARTBEAT, LOCK, is_running

if TYPE_CHECKING:
    from fp4train.run.queued import Step, Values
    from fp4train.run.run import Run

_DUMPING = 2.0
"""Seconds in which the stacks of all threads are written."""
SECONDS = 1.0
"""Time between two looks; a heartbeat is written at most every `BEAT_SECONDS`."""
BEAT_SECONDS = 3.0
END_SECONDS = 5.0
"""How long the end of a run waits for the last heartbeat."""
DATA_SECONDS = 10.0
"""Time after which a warning says that a step waits for its tokens; half of train.step_timeout if
that is less.
"""

_log = logging.getLogger(__name__)


class Watch(RunCompanion):
    """Has the thread.

    Attributes:
        loss: loss of the last step, for the heartbeat.
        lost: whether another process may train in the directory by now.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.loss: float | None = None
        self.lost = False
        self._lock: tuple[int, int] | None = None
        self._end = threading.Event()
        self._beat_at = -BEAT_SECONDS
        self._reported: int | None = None
        self._strange_beat = False
        """Whether it was said that no heartbeat can be written."""
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)

    def begin(self, run: Run) -> None:
        lock = run.record.folder.status(LOCK)
        self._lock = None if lock is None else (lock.st_dev, lock.st_ino)
        if run.world.lead:
            self._thread.start()

    def on_numbers(self, run: Run, step: Step, values: Values) -> None:
        self.loss, _ = step.read()

    def close(self, run: Run, error: BaseException | None) -> None:
        self._end.set()
        if run.world.lead:
            self._thread.join(END_SECONDS)

    def look(self) -> str | None:
        """Look at the directory now; returns `trouble`."""
        if self.trouble is not None or not self.run.world.lead:
            return self.trouble
        run = self.run
        status = os.fstat(run.record.folder.descriptor)
        try:
            there = os.stat(run.directory)
        except FileNotFoundError:
            there = None
        except OSError:  # a network file system that is away for a moment
            return None
        if there is None or (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
            if status.st_nlink == 0:
                what = "was removed"
            else:
                what = f"was moved to {_path(run.record.folder.descriptor)}"
            self.trouble = f"{run.directory} {what} while the run trained in it"
        elif self._lock is not None:
            lock = run.record.folder.status(LOCK)
            if lock is None or (lock.st_dev, lock.st_ino) != self._lock:
                self.lost = lock is not None and is_running(run.directory)
                if self.lost:
                    explanation = "another process trains there now"
                else:
                    explanation = "another process could have begun there"
                self.trouble = (
                    f"{run.directory / LOCK} was removed while the run trained: {explanation}"
                )
        return self.trouble

    def _work(self) -> None:
        while not self._end.wait(SECONDS):
            self._tell_of_data()
            self._round(running=True)
        self._round(running=False)

    def _tell_of_data(self) -> None:
        """Log, once per step, how long it has waited for its tokens."""
        run = self.run
        limit = self.run.config.train.step_timeout
        waits = run.data.feed.waiting()
        if (
            waits is None
            or run.step == self._reported
            or waits[0] < min(DATA_SECONDS, limit / 2 or DATA_SECONDS)
        ):
            return
        self._reported = run.step
        if limit:
            then = f"train.step_timeout={limit:g} ends the run"
        else:
            then = "train.step_timeout=… would end the run"
        _log.error("step %d waits %.0f s for %s: a slow disk? %s", run.step, *waits, then)

    def _round(self, *, running: bool) -> None:
        with suppress(OSError):
            self.look()
        if self.trouble is None and (
            not running or time.monotonic() - self._beat_at >= BEAT_SECONDS
        ):
            self._beat_at = time.monotonic()
            run = self.run
            beat = {
                "step": run.step,
                "of": run.config.train.steps,
                "time": time.time(),
                "loss": self.loss,
                "saved": run.saver.saved,
                "running": running,
                "run": run.record.journal.identity,
                "host": socket.gethostname(),
                "process": os.getpid(),
            }
            try:
                run.record.folder.write(HEARTBEAT, (json.dumps(beat) + "\n").encode(), sync=False)
            except NotPlain as error:
                if not self._strange_beat:
                    _log.warning("%s cannot be written: %s", run.directory / HEARTBEAT, error)
                self._strange_beat = True
            except OSError:  # a full disk, or one that is away: the next beat may be written
                pass


def _path(descriptor: int) -> Path | str:
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return "another place"


class Alarm:
    """A context that ends the process with the stacks of all threads on standard error if `set` is
    not called again within `seconds`. It is not set at first.

    A thread of C writes them and SIGALRM ends the process (142 in a shell), which need neither the
    interpreter nor its lock; nothing can be saved then. 0: never.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def set(self) -> None:
        if self.seconds > 0:
            faulthandler.dump_traceback_later(self.seconds, file=sys.__stderr__ or 2)
            signal.setitimer(signal.ITIMER_REAL, self.seconds + _DUMPING)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.seconds > 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
