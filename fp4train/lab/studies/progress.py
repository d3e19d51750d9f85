"""The progress of a study: a bar on a terminal, lines elsewhere, with the time that is left."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from tqdm import tqdm

_log = logging.getLogger(__name__)


class Shown(Protocol):
    """Receives how far a study is."""

    def __call__(self, done: int, total: int | None, what: str = "") -> None:
        """`done` of `total` are made (None: it is not known how many there will be); `what` is made, or comes next.

        The first call says how many there were before: the time that is left follows from those made since.
        """


@contextmanager
def study_progress(unit: str, every: float = 0.0) -> Iterator[Shown]:
    """Show what a study makes.

    Args:
        unit: what is counted, in the singular: "fork".
        every: seconds between two lines where there is no terminal; 0: a line for each.
    """
    terminal = sys.stderr.isatty()
    bar = tqdm(disable=not terminal, unit=unit, dynamic_ncols=True, smoothing=0.1)
    begun: tuple[float, int] | None = None
    last = time.perf_counter()

    def show(done: int, total: int | None, what: str = "") -> None:
        nonlocal begun, last
        now = time.perf_counter()
        if begun is None:
            begun, bar.initial = (now, done), done
        began, before = begun
        with suppress(OSError):  # a terminal that was closed is no reason to end a study
            bar.total, bar.n = total, done
            bar.set_postfix_str(what, refresh=False)
            bar.refresh()
        if not terminal and what and now - last >= every:
            last = now
            counted = f"{done} of {total} {unit}s" if total else f"{done} {unit}s"
            if total is not None and done != before:
                counted += f", {tqdm.format_interval((now - began) / (done - before) * (total - done))} left"
            _log.info("%s: %s", counted, what)

    try:
        yield show
    finally:
        with suppress(OSError):
            bar.close()
