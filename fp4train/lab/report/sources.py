"""The runs of a report, each read whole from its directory, or left out with the reason."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4train.errors import UserError
from fp4train.lab.analysis import ROUTINE, Errors, History, read_history
from fp4train.lab.analysis.compare import labelled
from fp4train.lab.analysis.figure import plain
from fp4train.lab.studies import read_studies
from fp4train.run.record import journal as run_journal
from fp4train.text import first_line, shortened
from fp4train.track.statistics import STATISTICS, read_statistics

IN_HISTORY = ("resume", "init", "rewind", "recipe")
"""Events of the metrics that the history tells, too."""
UNREADABLE = (
    UserError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors that reading a file of somebody else may raise."""


class RunSource:
    """One run.

    Args:
        path: directory of the run.

    Raises:
        UNREADABLE: a file of it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.number = 0
        """Number in the report, from 1."""
        self.metrics = read_history(path)
        self.name = self.metrics.name
        """A name that is unique in the report."""
        self.problems: list[str] = []
        """Messages about studies that could not be read."""
        self.config: Mapping[str, Any] = run_journal.flat(self.metrics.configuration or {})
        """Full key → value; empty where it is not known."""
        self.records = run_journal.read_journal(path)
        """Records of its journal; empty where it has none."""
        self.stretches = run_journal.stretches(self.records)
        """Stretches of steps that ran or are planned."""
        recorded = [(record.step, record.values.get("environment")) for record in self.records]
        self.environments: list[tuple[int, Mapping[str, Any]]] = [
            (step, environment) for step, environment in recorded if isinstance(environment, dict)
        ]
        """First step → environment, oldest first."""
        self.errors: Errors | None = None
        """Errors of quantisation, where they were measured."""
        if (path / STATISTICS).exists():
            statistics = read_statistics(path)
            self.errors = Errors(statistics) if len(statistics.operands["step"]) else None
        self.studies = read_studies(path, self.problems)
        self.events = _events(self.metrics, self.records)
        """(step, event, time, description) of what happened to it."""

    @property
    def label(self) -> str:
        """The number and the name, short enough for a heading."""
        return f"{self.number} {shortened(self.name, 40)}"

    @property
    def done(self) -> int:
        """Steps that were trained."""
        return int(self.metrics.series("train/loss").steps[-1])


def read_sources(
    paths: Sequence[Path], labels: Sequence[str] = (), baseline: Path | None = None
) -> tuple[list[RunSource], list[str]]:
    """The runs, and a sentence for each directory that is left out.

    Args:
        labels: names of the runs, as `labelled` has them.
        baseline: the run that comes first; None: they stay as they are.

    Raises:
        UserError: no run is left, or there are more or fewer labels.
    """
    sources: dict[str, RunSource] = {}
    left_out: list[str] = []
    for path in paths:
        place = os.path.realpath(path)
        if place in sources:
            left_out.append(f"{path} is named twice, or under two names")
            continue
        try:
            sources[place] = RunSource(path)
        except UNREADABLE as error:
            left_out.append(first_line(error))
    if not sources:
        raise UserError("no run can be reported: " + "; ".join(left_out))
    names = labelled([source.metrics for source in sources.values()], labels)
    for source, name in zip(sources.values(), names, strict=True):
        source.name = plain(name, 120)
    first = baseline and os.path.realpath(baseline)
    ordered = [sources[place] for place in sorted(sources, key=lambda place: place != first)]
    for number, source in enumerate(ordered, start=1):
        source.number = number
    return ordered, left_out


def _events(
    metrics: History, records: Sequence[run_journal.Record]
) -> list[tuple[int, str, str, str]]:
    events = [(r.step, r.event, r.time.replace("+00:00", " UTC"), r.describe()) for r in records]
    listed = {(step, name) for step, name, *_ in events}
    events += [
        (event.step, event.name, "", ", ".join(f"{k}: {v}" for k, v in event.values.items()))
        for event in metrics.events()
        if event.name not in (*IN_HISTORY, *ROUTINE) and (event.step, event.name) not in listed
    ]
    return sorted(events, key=lambda event: event[0])
