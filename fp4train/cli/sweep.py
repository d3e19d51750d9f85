"""The table of a sweep: its jobs, and the means of those that differ in their seed only."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fp4train.cli.output import terminal_width
from fp4train.config.schema import Config
from fp4train.errors import UserError
from fp4train.lab.analysis.history import History, read_history, seed_groups
from fp4train.text import tabulate


@dataclass(kw_only=True)
class SweepJob:
    """A point of a sweep.

    Args:
        point: overrides that other points do not share.
        ending: remark on an end that is not as it should be; empty: there is none.
    """

    point: str
    config: Config
    ending: str = "failed"


def table(jobs: Sequence[SweepJob]) -> str:
    """The jobs with their losses, and below them the means over seeds where there are several."""
    logged: list[tuple[SweepJob, History | None]] = []
    for job in jobs:
        history = None
        with suppress(UserError):  # it logged nothing
            history = read_history(job.config.run.dir)
        logged.append((job, history))
    rows = [
        (job.point, job.config.recipe.name, *_losses(history), str(job.config.run.dir), job.ending)
        for job, history in logged
    ]
    header = ("job", "recipe", "train loss", "val loss", "directory", "")
    lines = tabulate([header, *rows], right=(2, 3), width=terminal_width())
    if means := _means([(job, history) for job, history in logged if history is not None]):
        lines += ["", *means]
    return "\n".join(lines)


def _means(logged: Sequence[tuple[SweepJob, History]]) -> list[str]:
    """Mean ± standard deviation of the losses of each group of seeds; nothing where no group has
    two.
    """
    groups = [list(group.values()) for group in seed_groups([history for _, history in logged])]
    if all(len(members) < 2 for members in groups):
        return []
    rows = []
    for members in groups:
        job, _ = logged[members[0]]
        point = " ".join(word for word in job.point.split(" ") if not word.startswith("run.seed="))
        of_runs = [_last(history) for history in (logged[i][1] for i in members)]
        losses = (_spread([values[i] for values in of_runs]) for i in range(2))
        rows.append((point or "all", job.config.recipe.name, str(len(members)), *losses))
    header = ("mean ± deviation over seeds", "recipe", "n", "train loss", "val loss")
    return tabulate([header, *rows], right=(2, 3, 4), width=terminal_width())


def _last(history: History) -> tuple[float | None, float | None]:
    """The training loss and the last validation loss of a run; None where it has none."""
    training = float(history.loss("train/loss").values[-1])
    validation = history.series("val/loss").values
    return training, float(validation[-1]) if len(validation) else None


def _losses(history: History | None) -> tuple[str, str]:
    train, validation = (None, None) if history is None else _last(history)
    return _number(train), _number(validation)


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _spread(losses: Sequence[float | None]) -> str:
    logged = [loss for loss in losses if loss is not None]
    if len(logged) < len(losses):
        return "-"
    if len(logged) > 1:
        deviation = f" ± {np.std(logged, ddof=1):.4f}"
    else:
        deviation = ""
    return f"{np.mean(logged):.4f}{deviation}"
