"""The bound and the answers of gates at a checkpoint, in the folder of its run:
RUN/gates/STEP-MARK.

Every gate reads and writes them, wherever its record lies: another folder has the same seeds, so the
same forks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fp4train.errors import UserError
from fp4train.lab.studies.base import Base
from fp4train.lab.studies.record import MEASUREMENTS, open_record
from fp4train.text import first_line

_log = logging.getLogger(__name__)


class KeptQuestions:
    """What earlier gates asked of a checkpoint, as `StudyRecord` has it.

    Attributes:
        known: key → values.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._folder = base.source / "gates" / f"{base.step}-{base.mark}"
        self.known: Mapping[str, Any] = {}
        if (self._folder / MEASUREMENTS).exists():
            with open_record(self._folder, base.identity, base.step) as record:
                self.known = record.known

    def add(self, key: str, values: dict[str, Any]) -> None:
        """Write values, if there are none of this key; a folder that cannot be written is said."""
        try:
            with open_record(self._folder, self._base.identity, self._base.step) as record:
                if key not in record:
                    record.add(key, values)
                self.known = record.known
        except (OSError, UserError) as error:
            _log.warning("%s keeps no gate: %s", self._base.title, first_line(error))
