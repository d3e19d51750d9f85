"""The figures of runs that stand side by side, and the means of those that differ in their seed
only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp4train.lab.analysis.history import History, seed_groups


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
        train_loss, val_loss, loss: mean and standard deviation (of the sample, n − 1) of the
            smoothed training loss at the end, of the last validation loss (None where a run has
            none), and of the loss that gaps are of at `Comparison.step`; the deviation of a single
            run is None.
        gap: relative gap of the mean loss to that of the first run's group; None for that group.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    train_loss: tuple[float, float | None]
    val_loss: tuple[float, float | None] | None
    loss: tuple[float, float | None]
    gap: float | None


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
    histories: list[History], rows: Sequence[RunSummary], losses: Sequence[float]
) -> list[SeedMean]:
    """One per group of seeds; none if all are single.

    Args:
        rows: figures of each run.
        losses: loss of each run that gaps are of.
    """
    groups = seed_groups(histories)
    if all(len(group) < 2 for group in groups):
        return []
    means: list[SeedMean] = []
    for group in groups:
        members = list(group.values())
        loss = _mean([losses[i] for i in members])
        validation = [value for i in members if (value := rows[i].val_loss) is not None]
        reference = means[0].loss[0] if means else 0.0
        means.append(
            SeedMean(
                name=rows[members[0]].name,
                runs=tuple(rows[i].name for i in members),
                seeds=tuple(group),
                train_loss=_mean([rows[i].train_loss for i in members]),
                val_loss=_mean(validation) if len(validation) == len(members) else None,
                loss=loss,
                gap=loss[0] / reference - 1 if reference else None,
            )
        )
    return means


def _mean(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; a single value has no deviation."""
    if len(values) > 1:
        deviation = float(np.std(values, ddof=1))
    else:
        deviation = None
    return float(np.mean(values)), deviation


def loss_at(history: History, key: str, step: int, window: int) -> float:
    """A loss of a run at one of its steps; that of training is smoothed over `window`."""
    return float(history.loss(key, window).at(np.array([step]))[0])
