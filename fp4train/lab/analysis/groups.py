"""Losses and gaps of groups of seeds, with intervals.

A group holds the runs that differ in run.seed only. Its loss is the mean over them with Student's
95 % interval. The gap is relative, loss / loss of the first group − 1. Where two groups have the
same seeds, it is formed seed by seed and then averaged, because equal seeds read equal batches;
otherwise it is that of the means, and its error follows from the errors of both (Welch). A group of
one run has no interval.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from fp4train.lab.analysis.history import (
    NOT_THE_SAME_RUN,
    Floats,
    History,
    Series,
    common_window,
    configuration,
)
from fp4train.lab.intervals import Estimate, estimate
from fp4train.text import first_few, shortened

NAMED = 3
"""Runs of a group that are named."""
LOSSES = ("train/loss", "val/loss")
POINTS = 400
"""Points of a curve; of a longer one, evenly chosen ones."""


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Runs that differ in their seed only.

    Args:
        name: names of its runs, of the first ones if there are many.
        runs: histories, one per seed.
        places: places of the runs among all.
        seeds: seeds of the runs; a 0 where the configuration is not known.
    """

    name: str
    runs: Sequence[History]
    places: tuple[int, ...]
    seeds: tuple[int, ...]

    def losses(self, key: str, steps: Floats, window: int) -> Floats:
        """The losses [run, step] at steps that all runs have."""
        return np.stack([run.loss(key, window).at(steps) for run in self.runs])


def seed_groups(histories: Sequence[History], names: Sequence[str]) -> list[SeedGroup]:
    """The groups in the order of their first runs.

    A run whose configuration is not known, and a second one of the same seed, is a group of its
    own.
    """
    members: dict[str, dict[int, int]] = {}
    for index, history in enumerate(histories):
        seed, same = _identity(history)
        if same is None or seed in members.get(same, {}):
            same = f"run {index}"
        members.setdefault(same, {})[seed] = index
    return [
        SeedGroup(
            name=_joint_name([names[index] for index in group.values()]),
            runs=[histories[index] for index in group.values()],
            places=tuple(group.values()),
            seeds=tuple(group),
        )
        for group in members.values()
    ]


def _joint_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return first_few([shortened(name, 40) for name in names], NAMED)


def _identity(history: History) -> tuple[int, str | None]:
    """The seed of a run, and what runs of another seed share with it: configuration and recipes;
    None: not known.
    """
    config = configuration(history)
    try:
        assert config is not None
        seed = int(config["run"]["seed"])
    except (AssertionError, ValueError, KeyError, TypeError):
        return 0, None
    same = {key: value for key, value in config.items() if key not in NOT_THE_SAME_RUN}
    recipes = [(start, recipe) for start, _, recipe in history.bands()]
    return seed, json.dumps([same, config.get("init"), recipes], sort_keys=True, default=str)


def mean_loss(losses: Sequence[float]) -> Estimate:
    """The loss of a group from those of its runs; not a number where one of them is none."""
    if np.isfinite(losses).all():
        return estimate(losses)
    return estimate([math.nan])


def relative_gap(
    reference: SeedGroup, group: SeedGroup, base: Sequence[float], losses: Sequence[float]
) -> Estimate:
    """The gap of a group to `reference`, from the losses of the runs of both."""
    if not (np.isfinite([*base, *losses]).all() and all(base)):
        return estimate([math.nan])
    by_seed = dict(zip(reference.seeds, base, strict=True))
    if len(losses) > 1 and set(group.seeds) == set(by_seed):
        pairs = zip(group.seeds, losses, strict=True)
        return estimate([loss / by_seed[seed] - 1 for seed, loss in pairs])
    first = estimate(base)
    other = estimate(losses)
    ratio = other.mean / first.mean
    if first.error is None or other.error is None:
        return estimate([ratio - 1])
    shares = (first.error * ratio) ** 2, other.error**2
    total = sum(shares)
    freedom = first.freedom + other.freedom
    if total > 0:
        parts = shares[0] ** 2 / first.freedom + shares[1] ** 2 / other.freedom
        freedom = max(1, int(total**2 / parts))
    error = math.sqrt(total) / abs(first.mean)
    count = first.count + other.count
    return Estimate(mean=ratio - 1, error=error, count=count, freedom=freedom)


def loss_at(group: SeedGroup, key: str, step: int) -> Estimate:
    """The loss of a group at one step that all its runs have."""
    window = common_window(group.runs)
    return mean_loss(group.losses(key, np.array([float(step)]), window)[:, 0].tolist())


def gap_at(reference: SeedGroup, group: SeedGroup, key: str, step: int) -> Estimate:
    """The gap at one step that all runs have."""
    window = common_window([*reference.runs, *group.runs])
    base, losses = (
        each.losses(key, np.array([float(step)]), window)[:, 0].tolist()
        for each in (reference, group)
    )
    return relative_gap(reference, group, base, losses)


def loss_curve(group: SeedGroup, key: str) -> Series:
    """The loss of a group at the steps that all its runs have; training losses are smoothed."""
    steps = _common_steps([group], key)
    losses = group.losses(key, steps, common_window(group.runs))
    return _curve(steps, [mean_loss(of_step) for of_step in losses.T.tolist()])


def gap_curve(reference: SeedGroup, group: SeedGroup, key: str) -> Series:
    """The gap in per cent at the steps that all runs of both groups have."""
    steps = _common_steps([reference, group], key)
    window = common_window([*reference.runs, *group.runs])
    base, losses = (of.losses(key, steps, window).T.tolist() for of in (reference, group))
    gaps = [
        relative_gap(reference, group, first, other)
        for first, other in zip(base, losses, strict=True)
    ]
    return _curve(steps, gaps, 100.0)


def _common_steps(groups: Sequence[SeedGroup], key: str) -> Floats:
    """Steps that all runs have, at most `POINTS` of them, the last included."""
    series = [run.series(key).steps for group in groups for run in group.runs]
    steps: Floats = reduce(np.intersect1d, series)
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), POINTS)).round().astype(np.int64)
    return steps[np.unique(chosen)]


def _curve(steps: Floats, estimates: Sequence[Estimate], unit: float = 1.0) -> Series:
    bounds = [point.interval() or (math.nan, math.nan) for point in estimates]
    low, high = (np.array([unit * bound[side] for bound in bounds]) for side in (0, 1))
    mean = np.array([unit * point.mean for point in estimates], dtype=np.float64)
    return Series(steps=steps, values=mean, bounds=(low, high))
