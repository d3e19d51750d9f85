"""The figures of runs that stand side by side, and the means of those that differ in their seed
only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp4train.lab.analysis.groups import SeedGroup, mean_loss, relative_gap
from fp4train.lab.analysis.history import History
from fp4train.lab.intervals import Estimate


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run. Losses in nats per token; None where a run logged no such thing.

    Args:
        recipe: recipes in order of appearance.
        quantised: share of the linear layers' multiply-adds that were quantised, over the steps;
            None: not known.
        train_loss: smoothed loss at the run's last step.
        val_loss, best_val_loss: last and lowest validation loss, in high precision.
        gap: relative gap to the first run at `Comparison.step`; None for the first run.
        tokens_per_s: median over the run.
    """

    name: str
    recipe: str
    quantised: float | None
    steps: int
    train_loss: float
    val_loss: float | None
    best_val_loss: float | None
    gap: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class SeedMean:
    """Runs that differ in run.seed only.

    Args:
        runs, seeds: names of the runs and their seeds.
        train_loss, val_loss, loss: means of the smoothed training loss at the end, of the last
            validation loss (None where a run has none), and of the loss that gaps are of.
        gap: relative gap of that loss to the first group's; None for that group.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    train_loss: Estimate
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
        name=name,
        recipe=" → ".join(recipe for *_, recipe in history.bands()),
        quantised=quantised,
        steps=history.last_step,
        train_loss=float(history.loss("train/loss").values[-1]),
        val_loss=float(validation.values[-1]) if len(validation) else None,
        best_val_loss=float(finite.min()) if len(finite) else None,
        gap=gap,
        tokens_per_s=float(np.median(speed.values)) if len(speed) else None,
    )


def means_over_seeds(
    groups: Sequence[SeedGroup], rows: Sequence[RunSummary], losses: Sequence[float]
) -> list[SeedMean]:
    """One per group of seeds; none if all are single.

    Args:
        rows, losses: figures of each run, and the loss that gaps are of.
    """
    if all(len(group.runs) < 2 for group in groups):
        return []
    reference = groups[0]
    means = []
    for group in groups:
        of_group = [rows[place] for place in group.places]
        validation = [row.val_loss for row in of_group if row.val_loss is not None]
        base, own = ([losses[place] for place in of.places] for of in (reference, group))
        means.append(
            SeedMean(
                name=of_group[0].name,
                runs=tuple(row.name for row in of_group),
                seeds=group.seeds,
                train_loss=mean_loss([row.train_loss for row in of_group]),
                val_loss=mean_loss(validation) if len(validation) == len(of_group) else None,
                loss=mean_loss(own),
                gap=None if group is reference else relative_gap(reference, group, base, own),
            )
        )
    return means


def loss_of(history: History, key: str, step: int, window: int) -> float:
    """A loss of a run at one of its steps; that of training is smoothed over `window`."""
    return float(history.loss(key, window).at(np.array([step]))[0])
