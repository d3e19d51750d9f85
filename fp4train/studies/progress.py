"""What a person sees while a study measures: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from types import TracebackType

from tqdm import tqdm

_log = logging.getLogger(__name__)
_SECONDS = 15.0
"""Between two lines where there is no terminal."""


class StudyProgress:
    """Counts measurements. A context manager."""

    def __enter__(self) -> StudyProgress:
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(disable=not self.terminal, unit="measurement", dynamic_ncols=True, smoothing=0.1)
        self.began = self.last = time.perf_counter()
        return self

    def show(self, done: int, total: int | None, what: str) -> None:
        """`done` of `total` measurements are done (None: it is not known how many there will be); `what` comes next."""
        now = time.perf_counter()
        with suppress(OSError):  # a terminal that was closed is no reason to end a study
            self.bar.total, self.bar.n = total, done
            self.bar.set_postfix_str(what, refresh=False)
            self.bar.refresh()
        if not self.terminal and now - self.last > _SECONDS:
            self.last = now
            left = (
                f", {tqdm.format_interval((now - self.began) / done * (total - done))} left" if total and done else ""
            )
            _log.info("%d%s measurements%s, next: %s", done, f" of {total}" if total else "", left, what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.bar.close()
