"""The runs of a report, read from their directories. Damaged and missing parts are named; the rest is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.lab.analysis.figure import plain, shortened
from fp4train.lab.analysis.heatmap import Errors, errors_of
from fp4train.lab.analysis.history import Band, History, names_of, read_history
from fp4train.lab.studies.results import Studies, read_studies
from fp4train.run.record import directory as run_directory
from fp4train.run.record import journal as run_journal
from fp4train.run.record.stretches import RecordedStretch
from fp4train.run.record.trust import lost_records
from fp4train.sealed import identity, saved_config, unlike
from fp4train.track.config import METRICS
from fp4train.track.metrics import LIMIT
from fp4train.track.statistics import STATISTICS, read_statistics

RECIPE = 120
"""Characters of a recipe's name."""
UNREADABLE = (UserError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading a file of somebody else may raise."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSource:
    """One run.

    Args:
        number: in the report, from 1. name: unique in the report.
        metrics: its losses and events.
        records: of its history; empty where it has none. stretches: what ran and what is planned.
        config: full key → value; None where it is not known.
        environments: first step → environment, oldest first.
        errors: of quantisation, where they were measured.
        problems: what could not be read.
    """

    number: int
    name: str
    metrics: History
    records: Sequence[run_journal.Record] = field(repr=False)
    stretches: Sequence[RecordedStretch] = field(repr=False)
    config: Mapping[str, Any] | None = field(repr=False)
    environments: Sequence[tuple[int, Mapping[str, Any]]]
    errors: Errors | None = field(repr=False)
    studies: Studies
    problems: Sequence[str]

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
        """Its recipes: from the history, or where there is none from the metrics."""
        known = [(s.start, s.stop, s.recipe) for s in self.stretches] or self.metrics.bands()
        return [(start, stop, plain(recipe, RECIPE)) for start, stop, recipe in known]

    def setting(self, key: str) -> Any:
        """The value of a configuration key; None where it is not known."""
        return None if self.config is None else self.config.get(key)


def read_sources(paths: Sequence[Path]) -> tuple[list[RunSource], list[str]]:
    """The runs, and a sentence for each directory that is left out.

    Raises:
        UserError: no run is left.
    """
    found: list[History] = []
    left_out: list[str] = []
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            left_out.append(f"{path} is named twice, or under two names")
            continue
        seen.add(path.resolve())
        problems: list[str] = []
        history = _try(partial(_metrics, path), problems, None)
        if history is None:
            left_out += problems
        else:
            found.append(history)
    if not found:
        raise UserError("no run can be reported: " + "; ".join(left_out))
    names = names_of(found)
    return [_source(number, *each) for number, each in enumerate(zip(names, found, strict=True), start=1)], left_out


def _metrics(path: Path) -> History:
    history = read_history(path)
    for key in ("train/loss", "val/loss", "train/tokens", "perf/tokens_per_s"):
        history.series(key)  # numbers that are none are found here
    history.bands()
    history.events()
    return history


def _source(number: int, name: str, metrics: History) -> RunSource:
    problems: list[str] = []
    path = metrics.path
    records = _try(lambda: run_journal.read_journal(path), problems, list[run_journal.Record]())
    if not records and not problems:
        problems.append(f"{path} has no {run_directory.HISTORY}: recipes are read from its metrics")
    config = _try(lambda: _config(path, records, problems), problems, None)
    lost = _try(lambda: _lost(path, records), problems, dict[str, str]())
    problems += [each if name == METRICS else f"{each} (it is left out)" for name, each in lost.items()]
    records = [] if run_directory.HISTORY in lost else records
    environments = [
        (record.step, record.values["environment"])
        for record in records
        if isinstance(record.values.get("environment"), dict)
    ]
    return RunSource(
        number=number,
        name=plain(name, 120),
        metrics=metrics,
        records=records,
        stretches=run_journal.stretches(records),
        config=config,
        environments=environments,
        errors=None if STATISTICS in lost else _try(partial(_errors, path, problems), problems, None),
        studies=_try(lambda: read_studies(path, problems), problems, Studies()),
        problems=problems,
    )


def _errors(run: Path, problems: list[str]) -> Errors | None:
    """The quantisation errors of a run; None where none were measured. What is damaged is added to `problems`."""
    found = read_statistics(run, problems.append) if (run / STATISTICS).exists() else None
    return errors_of(found) if found is not None and len(found.operands["step"]) else None


def _lost(path: Path, records: Sequence[run_journal.Record]) -> dict[str, str]:
    """The records of a run that its newest checkpoint saw otherwise, or that are of another run: name → a sentence."""
    with Folder.open(path) as folder:
        state = checkpoint.newest_state(path / run_directory.CHECKPOINTS)
        found = lost_records(folder, state, records)
        if changed := unlike(folder, METRICS, state.get("metrics"), LIMIT):
            found[METRICS] = (
                f"{path / METRICS} {changed} since the newest checkpoint: losses are missing, or not as logged"
            )
        own, whose = identity(folder), records[-1].values.get("run") if records else None
    if own is not None and whose not in (None, own):
        found[run_directory.HISTORY] = f"{path / run_directory.HISTORY} is of run {whose}, not of this one ({own})"
    return found


def _config(path: Path, records: Sequence[run_journal.Record], problems: list[str]) -> dict[str, Any] | None:
    """The configuration in the journal, or else in the file, which is checked in any case."""
    known = run_journal.configuration(records)
    if known is not None:
        _try(lambda: saved_config(path / run_directory.CONFIG), problems, known)
        return known
    return run_journal.flat(OmegaConf.to_container(run_directory.read_config(path)))  # type: ignore[arg-type]


def _try(read: Callable[[], T], problems: list[str], default: T) -> T:
    try:
        return read()
    except UNREADABLE as error:
        problems.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
        return default
