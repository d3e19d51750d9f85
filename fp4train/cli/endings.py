"""What is said of runs that have ended: their losses and pictures; of a sweep a table of its jobs, with the
means of those that differ in their seed only.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fp4train.cli.launch import SweepJob
from fp4train.cli.output import terminal_width
from fp4train.errors import UserError, in_words
from fp4train.lab.analysis import (
    curves,
    figures_of_groups,
    heatmap,
    read_history,
    seed_groups,
    summarise,
    training_loss,
)
from fp4train.lab.analysis.groups import RunSummary
from fp4train.text import screen
from fp4train.track.config import METRICS
from fp4train.track.statistics import STATISTICS
from fp4train.train import Result


def table(jobs: Sequence[SweepJob]) -> str:
    """The jobs with their losses, and below them the means over seeds where there are several."""
    histories = []
    summaries = []
    recipes = {}
    points: list[tuple[SweepJob, RunSummary | None]] = []
    for job in jobs:
        if job.other_run:
            points.append((job, None))
            continue
        summary = None
        with suppress(UserError):  # it logged nothing
            history = read_history(job.config.run.dir)
            words = [word for word in job.point.split(" ") if not word.startswith("run.seed=")]
            summary = summarise(history, " ".join(words) or "all", None, None)
            histories.append(history)
            summaries.append(summary)
            recipes[summary.run] = job.config.recipe.name
        points.append((job, summary))
    losses = [summary.train_loss for summary in summaries]
    groups = seed_groups(histories, [summary.run for summary in summaries])
    several = len(groups) < len(histories)
    return screen(
        __package__,
        "sweep.txt",
        points=points,
        means=figures_of_groups(groups, summaries, losses) if several else [],
        recipes=recipes,
        width=terminal_width(),
    )


def draw(directory: Path) -> str:
    """Draw the curves of a run, and its statistics; a failure to draw them does not change the exit
    code.
    """
    if not (directory / METRICS).exists():
        return "; no curves, because track=none keeps no metrics"
    drawn = f"; {_drawn(curves.draw_curves, directory, 'curves')}"
    if (directory / STATISTICS).exists():
        drawn += f", {_drawn(heatmap.draw_statistics, directory, 'picture of statistics')}"
    return drawn


def _drawn(draw: Callable[[Path], Path], directory: Path, what: str) -> str:
    """The picture that was drawn, or why there is none."""
    try:
        return str(draw(directory))
    except (UserError, OSError) as error:
        return f"no {what} ({in_words(error)})"


def summary(directory: Path, result: Result) -> str:
    """The losses of a run, and where it lies."""
    return screen(
        __package__,
        "trained.txt",
        directory=directory,
        result=result,
        mean=training_loss(directory),
        stopped_by=None if result.signal is None else signal.Signals(result.signal).name,
    )
