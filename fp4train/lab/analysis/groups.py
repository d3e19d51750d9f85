"""The figures of runs side by side; losses and gaps of groups of seeds, with intervals.

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
        names: names of its runs.
        runs: histories, one per seed.
        places: places of the runs among all.
        seeds: seeds of the runs; a 0 where the configuration is not known.
    """

    names: Sequence[str]
    runs: Sequence[History]
    places: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of its runs, of the first ones if there are many: a-seed=0, 1, 2."""
        names = list(dict.fromkeys(self.names))
        if len(names) == 1:
            return names[0]
        *start, _ = names[0].rpartition("=")
        seeds = [names[0], *(name.removeprefix("".join(start)) for name in names[1:])]
        return first_few([shortened(name, 40) for name in seeds], NAMED)

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
            names=[names[index] for index in group.values()],
            runs=[histories[index] for index in group.values()],
            places=tuple(group.values()),
            seeds=tuple(group),
        )
        for group in members.values()
    ]


def _identity(history: History) -> tuple[int, str | None]:
    """The seed of a run, and what runs of another seed share with it: configuration and recipes;
    None: not known.
    """
    config = history.configuration
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
    base_mean = estimate(base)
    mean = estimate(losses)
    ratio = mean.mean / base_mean.mean
    if base_mean.error is None or mean.error is None:
        return estimate([ratio - 1])
    shares = (base_mean.error * ratio) ** 2, mean.error**2
    total = sum(shares)
    freedom = base_mean.freedom + mean.freedom
    if total > 0:
        parts = shares[0] ** 2 / base_mean.freedom + shares[1] ** 2 / mean.freedom
        freedom = max(1, int(total**2 / parts))
    error = math.sqrt(total) / abs(base_mean.mean)
    count = base_mean.count + mean.count
    return Estimate(mean=ratio - 1, error=error, count=count, freedom=freedom)


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
        relative_gap(reference, group, of_reference, of_group)
        for of_reference, of_group in zip(base, losses, strict=True)
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


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run. Losses in nats per token; None where a run logged no such thing.

    Args:
        run: its name.
        recipe: recipes in order of appearance.
        quantised: share of the linear layers' multiply-adds that were quantised, over the steps;
            None: not known.
        train_loss: smoothed loss at the run's last step.
        val_loss, best_val_loss: last and lowest validation loss, in high precision.
        gap: relative gap to the first run at `Comparison.step`; None for the first run.
        tokens_per_s: median over the run.
    """

    run: str
    recipe: str
    quantised: float | None
    steps: int
    train_loss: float
    val_loss: float | None
    best_val_loss: float | None
    gap: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """The figures of a group of seeds, or of a single run.

    Args:
        runs, seeds: names of the runs and their seeds.
        train_loss, val_loss: means of the smoothed training loss at the end and of the last
            validation loss; None where runs end at different steps, or one has no such loss.
        loss: mean of the loss that gaps are of.
        gap: relative gap of that loss to the first group's; None for that group.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    train_loss: Estimate | None
    val_loss: Estimate | None
    loss: Estimate
    gap: Estimate | None


def summarise(
    history: History, name: str, gap: float | None, quantised: float | None
) -> RunSummary:
    """The figures of one run.

    Args:
        gap, quantised: see `RunSummary`.
    """
    validation = history.series("val/loss")
    speed = history.series("perf/tokens_per_s")
    finite = validation.values[np.isfinite(validation.values)]
    return RunSummary(
        run=name,
        recipe=" → ".join(recipe for *_, recipe in history.bands()),
        quantised=quantised,
        steps=history.last_step,
        train_loss=float(history.loss("train/loss").values[-1]),
        val_loss=float(validation.values[-1]) if len(validation) else None,
        best_val_loss=float(finite.min()) if len(finite) else None,
        gap=gap,
        tokens_per_s=float(np.median(speed.values)) if len(speed) else None,
    )


def figures_of_groups(
    groups: Sequence[SeedGroup], rows: Sequence[RunSummary], losses: Sequence[float]
) -> list[GroupFigures]:
    """The figures of each group.

    Args:
        rows, losses: figures of each run, and the loss that gaps are of.
    """
    reference = groups[0]
    figures = []
    for group in groups:
        of_group = [rows[place] for place in group.places]
        ends = {row.steps for row in of_group}
        training = [row.train_loss for row in of_group if len(ends) == 1]
        validation = [row.val_loss for row in of_group if row.val_loss is not None]
        base = [losses[place] for place in reference.places]
        of_runs = [losses[place] for place in group.places]
        figures.append(
            GroupFigures(
                name=group.name,
                runs=tuple(row.run for row in of_group),
                seeds=group.seeds,
                train_loss=mean_loss(training) if training else None,
                val_loss=mean_loss(validation) if len(validation) == len(training) else None,
                loss=mean_loss(of_runs),
                gap=None if group is reference else relative_gap(reference, group, base, of_runs),
            )
        )
    return figures
