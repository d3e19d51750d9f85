"""Audits of a run that failed themselves: the run goes on, and its end names what they left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp4train.text import first_line

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)


class AuditFailures:
    """The failures of the audits of `run`, of which the first one is logged.

    Attributes:
        reasons: subject, a layer or a part of the state → why it was not audited.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.reasons: dict[str, str] = {}

    @contextmanager
    def guarding(self, subject: str) -> Iterator[None]:
        """A context of an audit of `subject`: where it fails, that is noted, and nothing ends."""
        try:
            yield
        except Exception as error:
            self.add(subject, first_line(error))

    def add(self, subject: str, reason: str) -> None:
        """Note that `subject` could not be audited."""
        if not self.reasons:
            step = self.run.step + 1
            _log.warning("step %d: the audit of %s failed: %s", step, subject, reason)
            values = {"layer": subject, "reason": reason}
            self.run.record.tracker.log_event(step, "audit failed", values)
        self.reasons.setdefault(subject, reason)
