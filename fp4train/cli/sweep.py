"""The table of a sweep: its jobs, and the means of those that differ in their seed only."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fp4train.cli.output import terminal_width
from fp4train.config.schema import Config
from fp4train.errors import UserError
from fp4train.lab.analysis import (
    figures_of_groups,
    read_history,
    seed_groups,
    summarise,
)
from fp4train.lab.analysis.groups import RunSummary
from fp4train.text import screen


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
    histories = []
    summaries = []
    recipes = {}
    points: list[tuple[SweepJob, RunSummary | None]] = []
    for job in jobs:
        summary = None
        with suppress(UserError):  # it logged nothing
            history = read_history(job.config.run.dir)
            words = [word for word in job.point.split(" ") if not word.startswith("run.seed=")]
            summary = summarise(history, " ".join(words) or "all", None, None)
            histories.append(history)
            summaries.append(summary)
            recipes[summary.name] = job.config.recipe.name
        points.append((job, summary))
    losses = [summary.train_loss for summary in summaries]
    groups = seed_groups(histories, [summary.name for summary in summaries])
    several = len(groups) < len(histories)
    return screen(
        __package__,
        "sweep.txt",
        points=points,
        means=figures_of_groups(groups, summaries, losses) if several else [],
        recipes=recipes,
        width=terminal_width(),
    )
