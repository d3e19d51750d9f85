"""Losses and gaps of groups of seeds, with intervals.

A group holds the runs that differ in run.seed only. Its loss is the mean over them with Student's
95 % interval. The gap is relative, loss / loss of the first group − 1. Where two groups have the
same seeds, it is formed seed by seed and then averaged, because equal seeds read equal batches;
otherwise it is that of the means, and its error follows from the errors of both (Welch). A group of
one run has no interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from fp4train.errors import UserError
from fp4train.lab.analysis import RecipeRow, Series, common_step, common_window, seed_groups
from fp4train.lab.analysis.history import Floats
from fp4train.lab.analysis.over_steps import Losses
from fp4train.lab.report.sources import RunSource
from fp4train.lab.studies import Estimate, estimate
from fp4train.text import first_few, ranges, shortened

NAMED = 3
"""Runs of a group that are named."""
LOSSES = ("train/loss", "val/loss")
POINTS = 400
"""Points of a curve; of a longer one, evenly chosen ones."""


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Runs that differ in their seed only.

    Args:
        sources: runs, one per seed.
        seeds: seeds of the runs; empty where the configuration is not known.
    """

    sources: Sequence[RunSource]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of its runs, of the first ones if there are many."""
        names = [source.name for source in self.sources]
        if len(names) == 1:
            return names[0]
        return first_few([shortened(name, 40) for name in names], NAMED)

    @property
    def numbers(self) -> str:
        """The numbers of its runs: "1–3"."""
        return ranges((source.number for source in self.sources), least=3)

    @property
    def recipes(self) -> str:
        """The recipes of its first run, in order."""
        return " → ".join(recipe for *_, recipe in self.sources[0].bands)

    @property
    def done(self) -> list[int]:
        """Steps that its runs trained; one number where they are equal."""
        done = [source.done for source in self.sources]
        return done if len(set(done)) > 1 else done[:1]

    @property
    def train_loss(self) -> float:
        """The mean of the last smoothed training losses."""
        return math.fsum(source.summary.train_loss for source in self.sources) / len(self.sources)

    @property
    def best(self) -> float | None:
        """The lowest validation loss; None where there is none."""
        losses = [source.summary.best_val_loss for source in self.sources]
        return min((loss for loss in losses if loss is not None), default=None)


def group(sources: Sequence[RunSource]) -> list[SeedGroup]:
    """The groups of seeds, in the order of their first runs."""
    return [
        SeedGroup(sources=[sources[i] for i in members.values()], seeds=tuple(members))
        for members in seed_groups([source.metrics for source in sources])
    ]


def common(groups: Sequence[SeedGroup]) -> tuple[str, int] | None:
    """The loss and the step that gaps are of; None where the runs share no step."""
    try:
        return common_step([source.metrics for group in groups for source in group.sources])
    except UserError:
        return None


def curve(group: SeedGroup, key: str) -> Series:
    """The loss of a group at the steps that all its runs have; training losses are smoothed."""
    steps, (values,) = _common([group], key)
    return _curve(steps, [_loss(values[:, i]) for i in range(len(steps))])


def gap_curve(reference: SeedGroup, group: SeedGroup, key: str) -> Series:
    """The gap in per cent at the steps that all runs of both groups have."""
    steps, (base, mine) = _common([reference, group], key)
    return _curve(
        steps, [_gap(reference, group, base[:, i], mine[:, i]) for i in range(len(steps))]
    )


def losses(groups: Sequence[SeedGroup], at: tuple[str, int] | None) -> list[Losses]:
    """The curves of each group, and its gaps to the first one where the runs share a step."""
    reference = groups[0]
    all_losses = []
    for group in groups:
        gaps = []
        if at is not None and group is not reference:
            gaps = [gap_curve(reference, group, key) for key in LOSSES]
        all_losses.append(
            Losses(
                name=group.name,
                train=curve(group, LOSSES[0]),
                validation=curve(group, LOSSES[1]),
                gaps=gaps,
            )
        )
    return all_losses


def recipe_rows(groups: Sequence[SeedGroup]) -> list[RecipeRow]:
    """The recipes of every run, in the order of the runs."""
    numbered = [(source, index) for index, group in enumerate(groups) for source in group.sources]
    return [
        RecipeRow(
            label=str(source.number),
            index=index,
            bands=source.bands,
            done=source.done,
            marks=source.marks,
        )
        for source, index in sorted(numbered, key=lambda pair: pair[0].number)
    ]


def gap_at(reference: SeedGroup, group: SeedGroup, key: str, step: int) -> Estimate:
    """The gap in per cent at one step that all runs have."""
    window = _window([reference, group])
    base = _values(reference, key, step, window)
    return _gap(reference, group, base, _values(group, key, step, window))


def loss_at(group: SeedGroup, key: str, step: int) -> Estimate:
    """The loss of a group at one step that all its runs have."""
    return _loss(_values(group, key, step, _window([group])))


def _window(groups: Sequence[SeedGroup]) -> int:
    return common_window(source.metrics for group in groups for source in group.sources)


def _values(group: SeedGroup, key: str, step: int, window: int) -> Floats:
    losses = [source.metrics.loss(key, window) for source in group.sources]
    return np.array([series.at(np.array([float(step)]))[0] for series in losses])


def _common(groups: Sequence[SeedGroup], key: str) -> tuple[Floats, list[Floats]]:
    """(Steps that all runs have, at most `POINTS` of them, the last included; the losses [run,
    step] of each group).
    """
    window = _window(groups)
    series = [[source.metrics.loss(key, window) for source in group.sources] for group in groups]
    steps = reduce(np.intersect1d, [run.steps for runs in series for run in runs])
    if len(steps):
        steps = steps[
            np.unique(
                np.linspace(0, len(steps) - 1, min(len(steps), POINTS)).round().astype(np.int64)
            )
        ]
    return steps, [np.stack([run.at(steps) for run in runs]) for runs in series]


def _loss(values: Floats) -> Estimate:
    if np.isfinite(values).all():
        return estimate(values.tolist())
    return estimate([math.nan])


def _gap(reference: SeedGroup, group: SeedGroup, base: Floats, mine: Floats) -> Estimate:
    if not (np.isfinite(base).all() and base.all() and np.isfinite(mine).all()):
        return estimate([math.nan])
    by_seed = dict(zip(reference.seeds, base.tolist(), strict=True))
    if len(mine) > 1 and set(group.seeds) == set(by_seed):
        return estimate(
            [
                100 * (x / by_seed[seed] - 1)
                for seed, x in zip(group.seeds, mine.tolist(), strict=True)
            ]
        )
    a = estimate(base.tolist())
    b = estimate(mine.tolist())
    mean = 100 * (b.mean / a.mean - 1)
    if a.error is None or b.error is None:
        return estimate([mean])
    shares = (a.error * b.mean / a.mean) ** 2, b.error**2
    total = sum(shares)
    if total == 0:
        return Estimate(
            mean=mean, error=0.0, count=a.count + b.count, freedom=a.freedom + b.freedom
        )
    freedom = total**2 / (shares[0] ** 2 / a.freedom + shares[1] ** 2 / b.freedom)
    error = 100 * math.sqrt(total) / abs(a.mean)
    return Estimate(mean=mean, error=error, count=a.count + b.count, freedom=max(1, int(freedom)))


def _curve(steps: Floats, estimates: Sequence[Estimate]) -> Series:
    bounds = [point.interval() or (math.nan, math.nan) for point in estimates]
    mean = np.array([point.mean for point in estimates], dtype=np.float64)
    low, high = (np.array([bound[side] for bound in bounds], dtype=np.float64) for side in (0, 1))
    return Series(steps=steps, values=mean, bounds=(low, high))
