"""The progress of a study: a bar on a terminal, lines elsewhere, with the time that is left."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from types import TracebackType

from tqdm import tqdm

_log = logging.getLogger(__name__)


class StudyProgress:
    """Counts what a study makes. A context manager.

    Args:
        unit: what is counted, in the singular: "fork".
        every: seconds between two lines where there is no terminal; 0: a line for each.
    """

    def __init__(self, unit: str, every: float = 0.0) -> None:
        self.unit, self.every = unit, every

    def __enter__(self) -> StudyProgress:
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(disable=not self.terminal, unit=self.unit, dynamic_ncols=True, smoothing=0.1)
        self.begun: tuple[float, int] | None = None
        self.last = time.perf_counter()
        return self

    def show(self, done: int, total: int | None, what: str = "") -> None:
        """`done` of `total` are made (None: it is not known how many there will be); `what` is made, or comes next.

        The first call says how many there were before: the time that is left follows from those made since.
        """
        now = time.perf_counter()
        if self.begun is None:
            self.begun = now, done
            self.bar.initial = done
        with suppress(OSError):  # a terminal that was closed is no reason to end a study
            self.bar.total, self.bar.n = total, done
            self.bar.set_postfix_str(what, refresh=False)
            self.bar.refresh()
        if not self.terminal and what and now - self.last >= self.every:
            self.last = now
            counted = f"{done} of {total} {self.unit}s" if total else f"{done} {self.unit}s"
            _log.info("%s%s: %s", counted, self._left(now, done, total), what)

    def _left(self, now: float, done: int, total: int | None) -> str:
        began, before = self.begun or (now, done)
        if total is None or done == before:
            return ""
        return f", {tqdm.format_interval((now - began) / (done - before) * (total - done))} left"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.bar.close()
