"""Losses and gaps of groups of seeds, with intervals.

A group holds the runs that differ in run.seed only. Its loss is the mean over them with Student's 95 % interval. The
gap is relative, loss / loss of the first group − 1. Where two groups have the same seeds, it is formed seed by seed and
then averaged, because equal seeds read equal batches; otherwise it is that of the means, and its error follows from the
errors of both (Welch). A group of one run has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from fp4train.errors import UserError
from fp4train.lab.analysis.curves import Curve
from fp4train.lab.analysis.figure import shortened
from fp4train.lab.analysis.history import Floats, Series, common_step, seed_groups
from fp4train.lab.report.html import ranges
from fp4train.lab.report.sources import Source
from fp4train.lab.studies.statistics import Estimate, estimate

NAMED = 3
"""Runs of a group that are named."""
POINTS = 400
"""Points of a curve; of a longer one, evenly chosen ones."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seed only.

    Args:
        sources: one per seed. seeds: of each; empty where the configuration is not known.
    """

    sources: Sequence[Source]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its runs, the first ones if there are many."""
        names = [source.name for source in self.sources]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return names[0] if len(names) == 1 else ", ".join(shortened(each, 40) for each in names[:NAMED]) + more

    @property
    def numbers(self) -> str:
        """ "1–3": those of its runs."""
        return ranges(source.number for source in self.sources)


def group(sources: Sequence[Source]) -> list[Group]:
    """The groups of seeds, in the order of their first runs."""
    return [
        Group(sources=[sources[i] for i in each.values()], seeds=tuple(each))
        for each in seed_groups([source.metrics for source in sources])
    ]


def common(groups: Sequence[Group]) -> tuple[str, int] | None:
    """The loss and the step that gaps are of; None where the runs share no step."""
    try:
        return common_step([source.metrics for each in groups for source in each.sources])
    except UserError:
        return None


def curve(group: Group, key: str) -> Curve:
    """The loss of a group at the steps that all its runs have; training losses are smoothed."""
    steps, values = _stacked([_series(source, key) for source in group.sources])
    return _curve(steps, [_student(values[:, i]) for i in range(len(steps))])


def gap_curve(first: Group, group: Group, key: str) -> Curve:
    """The gap in per cent at the steps that all runs of both groups have."""
    ours, theirs = [[_series(source, key) for source in each.sources] for each in (group, first)]
    steps = reduce(np.intersect1d, [series.steps for series in (*ours, *theirs)])
    steps = steps[_chosen(len(steps))]
    mine, base = (np.stack([series.at(steps) for series in each]) for each in (ours, theirs))
    return _curve(steps, [_gap(first, group, base[:, i], mine[:, i]) for i in range(len(steps))])


def gap_at(first: Group, group: Group, key: str, step: int) -> Estimate:
    """The gap in per cent at one step that all runs have."""
    at = np.array([step], dtype=np.float64)
    base, mine = ([float(_series(s, key).at(at)[0]) for s in each.sources] for each in (first, group))
    return _gap(first, group, base, mine)


def loss_at(group: Group, key: str, step: int) -> Estimate:
    """The loss of a group at one step that all its runs have."""
    at = np.array([step], dtype=np.float64)
    return _student([float(_series(source, key).at(at)[0]) for source in group.sources])


def _gap(first: Group, group: Group, base: Sequence[float] | Floats, mine: Sequence[float] | Floats) -> Estimate:
    if any(not math.isfinite(x) or x == 0 for x in base) or not all(map(math.isfinite, mine)):
        return Estimate(mean=math.nan, error=None, count=1, freedom=0)
    by_seed = dict(zip(first.seeds, base, strict=True))
    if len(mine) > 1 and set(group.seeds) == set(by_seed):
        return estimate([100 * (x / by_seed[seed] - 1) for seed, x in zip(group.seeds, mine, strict=True)])
    a, b = estimate([float(x) for x in base]), estimate([float(x) for x in mine])
    mean = 100 * (b.mean / a.mean - 1)
    if a.error is None or b.error is None:
        return Estimate(mean=mean, error=None, count=1, freedom=0)
    shares = (a.error * b.mean / a.mean) ** 2, b.error**2
    total = sum(shares)
    if total == 0:
        return Estimate(mean=mean, error=0.0, count=a.count + b.count, freedom=a.freedom + b.freedom)
    freedom = total**2 / (shares[0] ** 2 / a.freedom + shares[1] ** 2 / b.freedom)
    error = 100 * math.sqrt(total) / abs(a.mean)
    return Estimate(mean=mean, error=error, count=a.count + b.count, freedom=max(1, int(freedom)))


def _student(values: Sequence[float] | Floats) -> Estimate:
    if not all(map(math.isfinite, values)):
        return Estimate(mean=math.nan, error=None, count=1, freedom=0)
    return estimate([float(value) for value in values])


def _series(source: Source, key: str) -> Series:
    series = source.metrics.series(key)
    return series.smoothed() if key == "train/loss" else series


def _stacked(series: Sequence[Series]) -> tuple[Floats, Floats]:
    steps = reduce(np.intersect1d, [each.steps for each in series])
    steps = steps[_chosen(len(steps))]
    return steps, np.stack([each.at(steps) for each in series])


def _chosen(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Indices of at most `POINTS` points, the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(np.int64)) if count else np.arange(0)


def _curve(steps: Floats, found: Sequence[Estimate]) -> Curve:
    bounds = [each.interval() or (math.nan, math.nan) for each in found]
    mean = np.array([each.mean for each in found], dtype=np.float64)
    low, high = (np.array([each[side] for each in bounds], dtype=np.float64) for side in (0, 1))
    return Curve(steps=steps, mean=mean, low=low, high=high)
