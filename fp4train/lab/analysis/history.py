"""RUN/metrics.jsonl as series over steps and bands of recipes.

A band is a range of steps in one recipe, read from ``precision/recipe``: phases and swaps both
start one, also in a resumed run. Losses of training are smoothed (`fp4train.track.series`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.audits.fault import AUDIT
from fp4train.errors import UserError
from fp4train.paths import INIT_KEYS
from fp4train.run.record.directory import require_run
from fp4train.sealed import CONFIG, saved_config
from fp4train.track.config import METRICS
from fp4train.track.metrics import read_metrics
from fp4train.track.series import Floats as Floats, Series as Series, TrainingLoss

_log = logging.getLogger(__name__)

Band = tuple[int, int, str]
"""First step, step after the last, recipe. Steps count from 0, as in the plan."""

ROUTINE = (AUDIT,)
"""Events that happen all the time, and are neither marked nor listed."""
NOT_THE_SAME_RUN = (
    "run",
    "gpu",
    "plugins",
    "resume",
    "resume_step",
    "track",
    "checkpoint",
    *INIT_KEYS,
)
"""Sections of a configuration in which runs of another seed may differ."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A logged event."""

    step: int
    name: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class History:
    """The lines of one run."""

    path: Path
    lines: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def last_step(self) -> int:
        return max(int(line["step"]) for line in self.lines)

    @cached_property
    def configuration(self) -> dict[str, Any] | None:
        """The configuration of the run; None: not known."""
        try:
            return saved_config(self.path / CONFIG)
        except UserError as error:
            if (self.path / CONFIG).exists():
                _log.warning("%s", error)
            return None

    def series(self, key: str) -> Series:
        by_step: dict[int, float] = {}
        for line in self.lines:
            value = line.get(key)
            if isinstance(value, int | float):
                by_step[line["step"]] = float(value)
        return Series.by_step(by_step)

    def loss(self, key: str, window: int | None = None) -> Series:
        """A series of losses; those of training are smoothed, over `window` (None: the run's own)."""
        if key == "train/loss":
            return self.series(key).smoothed(window)
        return self.series(key)

    def bands(self) -> list[Band]:
        """The recipes; the first begins at step 0, each ends where the next one begins or the run
        does. The line of a step has the number of steps done, which is one more than its own.
        """
        by_step = {
            line["step"]: str(line["precision/recipe"])
            for line in self.lines
            if line.get("precision/recipe")
        }
        steps = sorted(by_step)
        lines = [
            step for i, step in enumerate(steps) if not i or by_step[steps[i - 1]] != by_step[step]
        ]
        changes = [line - 1 for line in lines[1:]]
        bounds = zip([0, *changes], [*changes, *steps[-1:]], lines, strict=False)
        return [(begin, end, by_step[line]) for begin, end, line in bounds]

    def events(self) -> list[Event]:
        return [
            Event(
                step=line["step"],
                name=str(line["event"]),
                values={key: value for key, value in line.items() if key not in ("step", "event")},
            )
            for line in self.lines
            if "event" in line
        ]


def read_history(run: Path) -> History:
    """The history of a run directory.

    Raises:
        UserError: not a run directory, or no loss logged yet.
    """
    run = Path(run)
    lines = []
    if (run / METRICS).exists():
        lines = read_metrics(run / METRICS)
    else:
        require_run(run)
    history = History(path=run, lines=lines)
    if not len(history.series("train/loss")):
        raise UserError(f"{run} has no metrics yet: no train/loss in its {METRICS}")
    return history


def names_of(histories: Sequence[History]) -> list[str]:
    """The directory's name; where two runs share it, the path."""
    count = Counter(history.name for history in histories)
    return [
        history.name if count[history.name] == 1 else str(history.path) for history in histories
    ]


def common_step(histories: Sequence[History]) -> tuple[str, int] | None:
    """The loss that gaps are of, and the last step that all runs have it at; None: there is none."""
    for key in ("val/loss", "train/loss"):
        steps = reduce(np.intersect1d, [history.series(key).steps for history in histories])
        if len(steps):
            return key, int(steps[-1])
    return None


def common_window(histories: Iterable[History]) -> int:
    """The window over which the training losses of several runs are smoothed alike: the smallest of
    theirs. A trailing mean over more steps lags behind, which would look like a gap.
    """
    return min(history.series("train/loss").window for history in histories)


def training_loss(run: Path) -> TrainingLoss | None:
    """The training loss of a run; None where nothing is logged."""
    try:
        history = read_history(run)
    except UserError:
        return None
    return TrainingLoss.of(history.series("train/loss"))
