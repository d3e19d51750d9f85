"""The bound and the answers of gates at a checkpoint, in the folder of its run:
RUN/gates/STEP-MARK.

Every gate reads and writes them, wherever its record lies, and however many batches evaluate its
forks: the seeds are the same, so the trainings are.
"""

import logging
from collections.abc import Mapping
from typing import Any

from fp4train.errors import UserError
from fp4train.lab.studies import MEASUREMENTS, Base, open_record
from fp4train.text import first_line

_log = logging.getLogger(__name__)


class KeptQuestions:
    """What earlier gates asked of a checkpoint, as `StudyRecord` has it.

    Attributes:
        known: key → values.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._folder = base.source / "gates" / f"{base.step}-{base.training_mark}"
        self.known: Mapping[str, Any] = {}
        if (self._folder / MEASUREMENTS).exists():
            with open_record(self._folder, base.training_identity, base.step) as record:
                self.known = dict(record.known)

    def add(self, key: str, values: dict[str, Any]) -> None:
        """Write values, if there are none of this key; a folder that cannot be written is said."""
        base = self._base
        try:
            with open_record(self._folder, base.training_identity, base.step) as record:
                if key not in record:
                    record.add(key, values)
                self.known = dict(record.known)
        except (OSError, UserError) as error:
            _log.warning("%s keeps no gate: %s", base.title, first_line(error))
