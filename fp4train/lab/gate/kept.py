"""The bound and the answers of gates at a checkpoint, in the folder of its run:
RUN/gates/STEP-MARK.

Every gate reads and writes them, wherever its record lies, and however many batches evaluate its
forks: the seeds are the same, so the trainings are. Folders of earlier versions, one for each number
of batches, are read, too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fp4train.errors import UserError
from fp4train.lab.studies import MEASUREMENTS, Base, open_record
from fp4train.lab.studies.record import REMEDY
from fp4train.text import first_line
from fp4train.track.metrics import read_metrics

_log = logging.getLogger(__name__)


class KeptQuestions:
    """What earlier gates asked of a checkpoint, as `StudyRecord` has it.

    Attributes:
        known: key → values.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._folder = base.source / "gates" / f"{base.step}-{base.training_mark}"
        self._of_earlier_versions = self._read_earlier_versions()
        self.known: Mapping[str, Any] = dict(self._of_earlier_versions)
        if (self._folder / MEASUREMENTS).exists():
            with open_record(self._folder, base.training_identity, base.step) as record:
                self.known = {**self._of_earlier_versions, **record.known}

    def _read_earlier_versions(self) -> dict[str, Any]:
        """What the folders hold that have a number of batches; keys end with the folder's name."""
        base = self._base
        measurements = {}
        for path in sorted(self._folder.parent.glob(f"{base.step}-*/{MEASUREMENTS}")):
            if path.parent == self._folder:
                continue
            header, *lines = read_metrics(path, REMEDY) or [{}]
            identity = dict(header.get("identity", {}))
            for key in ("batches", "format", "fp4train"):
                identity.pop(key, None)
            if identity == json.loads(json.dumps(base.training_identity)):
                for line in lines:
                    measurements[f"{line['key']}/{path.parent.name}"] = line["values"]
        return measurements

    def add(self, key: str, values: dict[str, Any]) -> None:
        """Write values, if there are none of this key; a folder that cannot be written is said."""
        base = self._base
        try:
            with open_record(self._folder, base.training_identity, base.step) as record:
                if key not in record:
                    record.add(key, values)
                self.known = {**self._of_earlier_versions, **record.known}
        except (OSError, UserError) as error:
            _log.warning("%s keeps no gate: %s", base.title, first_line(error))
