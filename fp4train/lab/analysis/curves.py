"""Pictures over steps: the losses of one run (RUN/curves.png), or of several with their gaps to the
first; below them the recipe of every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4train.lab.analysis import figure as look
from fp4train.lab.analysis.figure import Draw, Panel
from fp4train.lab.analysis.groups import LOSSES, SeedGroup, gap_curve, loss_curve, seed_groups
from fp4train.lab.analysis.history import (
    ROUTINE,
    Band,
    History,
    Series,
    common_step,
    read_history,
)
from fp4train.text import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = "curves.png"
SHARE = "data/share/"
SETTLED = 10
"""The axis of gaps leaves out a tenth of the steps at the beginning."""
ROW = 28
"""Characters of the name beside a row of recipes, and of an inch of the picture's width: where the
longest name is too long for it, each row has a sign in the colour of its curve.
"""
ROW_PER_INCH = 4
SIGN = "■"
BAND = "95 % interval of the mean over seeds"


class RecipeRow(NamedTuple):
    """The recipes over the steps of a group of seeds, which have the same ones.

    Args:
        colour: index of its curve.
    """

    name: str
    colour: int
    bands: Sequence[Band]


def draw_curves(run_dir: Path) -> Path:
    """Draw RUN/curves.png from RUN/metrics.jsonl.

    Raises:
        UserError: not a run directory, or nothing logged yet.
    """
    history = read_history(run_dir)
    path = Path(run_dir) / CURVES
    groups = seed_groups([history], [history.name])
    look.save(curves(groups), look.PICTURE, path)
    return path


def curves(groups: Sequence[SeedGroup]) -> Draw:
    """The mean losses of groups of seeds with their intervals, the gaps to the first group where
    there are some, and the recipes of every group; of a single run also its learning rate and
    gradient norm.
    """
    loss = Panel(
        title="loss (nats per token): training, smoothed; dots: validation",
        height=3.2,
        paint=lambda axes: _losses(axes, groups),
    )
    above = [loss]
    if common_step([run for group in groups for run in group.runs]) and len(groups) > 1:
        title = f"gap to {groups[0].name}, %: training, smoothed; dots: validation"
        above.append(Panel(title=title, height=1.8, paint=lambda axes: _gaps(axes, groups)))
    longest = [max(group.runs, key=lambda run: run.last_step) for group in groups]
    rows = [
        RecipeRow(group.name, index, run.bands())
        for index, (group, run) in enumerate(zip(groups, longest, strict=True))
    ]
    right = max(1, *(run.last_step for run in longest)) * 1.012  # no marker at the end is cut
    run, *further_seeds = groups[0].runs
    if further_seeds or len(groups) > 1:
        return _over_steps(above, rows, right)
    panels = [Panel(title=loss.title, height=3.9, paint=lambda axes: _own_losses(axes, groups))]
    if parts := sorted({key for line in run.lines for key in line if key.startswith(SHARE)}):
        title = "shares of the parts of the data"
        panels.append(Panel(title=title, height=1.2, paint=lambda axes: _shares(axes, run, parts)))
    keys = {"train/lr": "learning rate", "train/grad_norm": "gradient norm"}
    small = [_small(run, key, title) for key, title in keys.items()]
    return _over_steps(panels, rows, right, small)


def _over_steps(
    above: Sequence[Panel],
    rows: Sequence[RecipeRow],
    right: float,
    below: Sequence[Panel] = (),
) -> Draw:
    """Panels above and below the recipes of runs, all over the steps up to `right`; lines where
    recipes change.
    """

    def over_steps(panel: Panel) -> Panel:
        def paint(axes: Axes) -> None:
            panel.paint(axes)
            axes.set_xlim(0, right)
            for row in rows:
                for start, *_ in row.bands[1:]:
                    colour = look.colour_of(row.colour)
                    axes.axvline(start, color=colour, lw=0.8, ls=look.DASHED, alpha=0.6)

        return replace(panel, paint=paint)

    recipes = Panel(
        title="recipe",
        height=0.6 + 0.2 * len(rows),
        paint=lambda axes: _recipes(axes, rows, right),
    )
    grid = [[over_steps(panel)] for panel in above]
    grid.append([recipes])
    if below:
        grid.append([over_steps(panel) for panel in below])
    return look.picture(grid)


def _line(axes: Axes, series: Series, **shape: Any) -> None:
    """A curve, with the interval of each of its points where it has one."""
    if len(series) <= 2:
        shape = {"marker": "o", **shape}
    axes.plot(series.steps, series.values, **shape)
    if series.bounds is not None:
        axes.fill_between(series.steps, *series.bounds, color=shape["color"], alpha=0.15, lw=0)


def _own_losses(axes: Axes, groups: Sequence[SeedGroup]) -> None:
    """`_losses` of one run, with each logged loss, that in the recipe, and what happened."""
    (run,) = groups[0].runs
    _line(axes, run.series("train/loss"), color=look.TRAIN, alpha=0.28, lw=0.8)
    in_recipe = run.series("val/loss_recipe")
    if len(in_recipe):
        label = "validation in the recipe"
        _line(axes, in_recipe, color=look.QUIET, ls="--", lw=1.2, label=label)
    _losses(axes, groups)
    _mark_events(axes, run)


def _shares(axes: Axes, run: History, parts: Sequence[str]) -> None:
    for index, key in enumerate(parts, start=1):
        shape = {"label": key.removeprefix(SHARE), "color": look.colour_of(index)}
        _line(axes, run.series(key), drawstyle="steps-mid", **shape)


def _small(history: History, key: str, title: str) -> Panel:
    """A small panel of one key of the metrics."""
    series = history.series(key)
    positive = series.values[series.values > 0]

    def paint(axes: Axes) -> None:
        axes.set_xlabel("step")
        look.few_ticks(axes, 5, integer=True)
        if not len(series):
            axes.set_title(f"{title}: not logged", loc="left")
            axes.set_yticks([])
            return
        if key == "train/grad_norm" and len(positive):
            look.logarithmic(axes, positive.min(), positive.max(), even=3.0)
        _line(axes, series, color=look.INK, lw=0.9)

    return Panel(title=title, height=1.4, paint=paint)


def _mark_events(axes: Axes, history: History) -> None:
    names: dict[int, list[str]] = {}
    for event in history.events():
        if event.name not in ("recipe", *ROUTINE):  # the strip shows recipes
            names.setdefault(event.step, []).append(event.name)
    for step, several in names.items():
        axes.axvline(step, color=look.INK, lw=0.9, ls=look.DASHED, alpha=0.6, zorder=1)
        axes.annotate(
            " · ".join(dict.fromkeys(several)),
            (step, 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(-2, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=7.5,
        )


def _losses(axes: Axes, groups: Sequence[SeedGroup]) -> None:
    drawn = []
    for index, group in enumerate(groups):
        train, validation = (loss_curve(group, key) for key in LOSSES)
        shape = {"color": look.colour_of(index), "ls": look.line_of(index)}
        _line(axes, train, lw=1.4, label=group.name, **shape)
        _line(axes, validation, **{**shape, "ls": "", "marker": "o", "ms": 3})
        drawn += [train.values, validation.values]
    if any(len(group.runs) > 1 for group in groups):
        axes.plot([], [], color=look.LINE, lw=6, label=BAND)  # the sample of all bands
    look.loss_axis(axes, drawn)


def _gaps(axes: Axes, groups: Sequence[SeedGroup]) -> None:
    reference = groups[0]
    settled = []
    axes.axhline(0, color=look.colour_of(0), lw=1.1)
    for index, group in enumerate(groups[1:], start=1):
        train, validation = (gap_curve(reference, group, key) for key in LOSSES)
        shape = {"color": look.colour_of(index), "ls": look.line_of(index)}
        _line(axes, replace(train, bounds=None), lw=0.9, alpha=0.5, **shape)
        _line(axes, validation, lw=1.4, marker="o", ms=3, **shape)
        drawn = (train.values, validation.values, *(validation.bounds or ()))
        settled += [values[len(values) // SETTLED :] for values in drawn]
    axes.set_ylim(*look.gap_limits(settled))


def _recipes(axes: Axes, rows: Sequence[RecipeRow], right: float) -> None:
    """The recipes, a row for each curve."""
    grounds = look.grounds(recipe for row in rows for *_, recipe in row.bands)
    for place, row in enumerate(rows):
        for start, stop, recipe in row.bands:
            shape: dict[str, Any] = {"height": 0.8, "lw": 0.5, **grounds[recipe]}
            axes.barh(place, stop - start, left=start, label=recipe, **shape)
    names = [shortened(row.name, ROW) for row in rows]
    if max(map(len, names)) > ROW_PER_INCH * look.inches_wide(axes):
        names = [SIGN] * len(rows)
    look.name_rows(axes, names, ticks=10, integer=True)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(look.colour_of(row.colour))
    axes.grid(visible=False)
    axes.spines[["left"]].set_visible(False)
    axes.set_xlim(0, right)
    axes.set_xlabel("step")
