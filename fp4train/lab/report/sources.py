"""The runs of a report, read from their directories. Damaged and missing parts are named; the rest
is used.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fp4train import checkpoint
from fp4train.audit.fault import AUDIT, AUDIT_FAULT
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.lab.analysis import (
    ROUTINE,
    Band,
    Errors,
    History,
    read_history,
)
from fp4train.lab.analysis.figure import plain
from fp4train.lab.analysis.history import names_of
from fp4train.lab.studies import Studies, read_studies
from fp4train.run.record import directory as run_directory, journal as run_journal
from fp4train.run.record.trust import lost_records
from fp4train.sealed import changed_since, identity, saved_config
from fp4train.text import counted, first_line, shortened
from fp4train.track.config import METRICS
from fp4train.track.metrics import LIMIT
from fp4train.track.statistics import STATISTICS, read_statistics

RECIPE = 120
"""Characters of a recipe's name."""
MARKS = {"swap": "v", "resume": "|", "branch": "|", "init": "|", "non-finite": "x"}
"""Event → matplotlib's marker on the recipes of a run."""
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

T = TypeVar("T")


class RunSource:
    """One run, read from its directory as far as it can be.

    Args:
        number: number in the report, from 1.
        name: name that is unique in the report.
        metrics: losses and events of the run.
    """

    def __init__(self, number: int, name: str, metrics: History) -> None:
        self.number = number
        self.name = plain(name, 120)
        self.metrics = metrics
        self.problems: list[str] = []
        """Messages about files that could not be read."""
        path = metrics.path
        records = self._try(lambda: run_journal.read_journal(path), list[run_journal.Record]())
        if not records and not self.problems:
            self.problems.append(
                f"{path} has no {run_directory.HISTORY}: recipes are read from its metrics"
            )
        self.config: Mapping[str, Any] = self._try(
            lambda: run_journal.flat(saved_config(path / run_directory.CONFIG)), {}
        )
        """Full key → value; empty where it is not known."""
        lost = self._try(lambda: _lost(path, records), dict[str, str]())
        self.problems += [
            sentence if name == METRICS else f"{sentence} (it is left out)"
            for name, sentence in lost.items()
        ]
        self.records = [] if run_directory.HISTORY in lost else records
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
        if STATISTICS not in lost and (path / STATISTICS).exists():
            self.errors = self._try(self._errors, None)
        self.studies = self._try(lambda: read_studies(path, self.problems), Studies())

    def _try(self, read: Callable[[], T], default: T) -> T:
        """What is read; the default where it cannot be, which is a problem."""
        return _read(read, self.problems, default)

    def _errors(self) -> Errors | None:
        statistics = read_statistics(self.metrics.path, self.problems.append)
        return Errors(statistics) if len(statistics.operands["step"]) else None

    @property
    def label(self) -> str:
        """The number and the name, short enough for a heading."""
        return f"{self.number} {shortened(self.name, 40)}"

    @property
    def done(self) -> int:
        """Steps that were trained."""
        return int(self.metrics.series("train/loss").steps[-1])

    @property
    def bands(self) -> list[Band]:
        """The run's recipes: from the history, or where there is none from the metrics."""
        bands = [(s.start, s.stop, s.recipe) for s in self.stretches] or self.metrics.bands()
        return [(start, stop, plain(recipe, RECIPE)) for start, stop, recipe in bands]

    @property
    def events(self) -> list[tuple[int, str, str, str]]:
        """(step, event, time, description) of what happened to it."""
        events = [
            (r.step, r.event, r.time.replace("+00:00", " UTC"), r.describe()) for r in self.records
        ]
        listed = {(step, name) for step, name, *_ in events}
        events += [
            (event.step, event.name, "", ", ".join(f"{k}: {v}" for k, v in event.values.items()))
            for event in self.metrics.events()
            if event.name not in (*IN_HISTORY, *ROUTINE) and (event.step, event.name) not in listed
        ]
        return sorted(events, key=lambda event: event[0])

    @property
    def marks(self) -> list[tuple[int, str]]:
        """(step, marker) of the events that are marked on its recipes."""
        return [(step, MARKS[name]) for step, name, *_ in self.events if step and name in MARKS]

    @property
    def audited(self) -> str:
        """A sentence about the audits of the run; empty: its metrics have none."""
        events = self.metrics.events()
        layers = [str(event.values.get("layer")) for event in events if event.name == AUDIT]
        unlisted = [event.values.get("more", 0) for event in events if event.name == AUDIT_FAULT]
        if not layers and not unlisted:
            return ""
        faults = len(unlisted) + sum(more for more in unlisted if isinstance(more, int))
        return (
            f"{self.label}: {counted(len(layers), 'audit')} of "
            f"{counted(len(set(layers)), 'live layer')} against the readable reference; "
            f"{counted(faults, 'fault')} in all audits."
        )


def read_sources(paths: Sequence[Path]) -> tuple[list[RunSource], list[str]]:
    """The runs, and a sentence for each directory that is left out.

    Raises:
        UserError: no run is left.
    """
    histories: dict[str, History] = {}
    left_out: list[str] = []
    for path in paths:
        place = os.path.realpath(path)
        if place in histories:
            left_out.append(f"{path} is named twice, or under two names")
        elif (history := _read(partial(_metrics, path), left_out, None)) is not None:
            histories[place] = history
    if not histories:
        raise UserError("no run can be reported: " + "; ".join(left_out))
    names = names_of(list(histories.values()))
    return [
        RunSource(number, name, metrics)
        for number, (name, metrics) in enumerate(zip(names, histories.values(), strict=True), 1)
    ], left_out


def _metrics(path: Path) -> History:
    history = read_history(path)
    for key in ("train/loss", "val/loss", "train/tokens", "perf/tokens_per_s"):
        history.series(key)  # numbers that are none are found here
    history.bands()
    history.events()
    return history


def _lost(path: Path, records: Sequence[run_journal.Record]) -> dict[str, str]:
    """The records of a run that its newest checkpoint saw otherwise, or that are of another run:
    name → a sentence.
    """
    with Folder.open(path) as folder:
        state = checkpoint.newest_state(path / run_directory.CHECKPOINTS)
        lost = lost_records(folder, state, records)
        if changed := changed_since(folder, METRICS, state.get("metrics"), LIMIT):
            lost[METRICS] = (
                f"{path / METRICS} {changed} since the newest checkpoint: losses are missing, "
                "or not as logged"
            )
        run_identity = identity(folder)
        whose = records[-1].values.get("run") if records else None
    if run_identity is not None and whose not in (None, run_identity):
        lost[run_directory.HISTORY] = (
            f"{path / run_directory.HISTORY} is of run {whose}, not of this one ({run_identity})"
        )
    return lost


def _read(read: Callable[[], T], problems: list[str], default: T) -> T:
    try:
        return read()
    except UNREADABLE as error:
        problems.append(first_line(error))
        return default
