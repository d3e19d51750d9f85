"""Figures over steps: the losses of one run (RUN/curves.png); of several runs, their gaps, and the
recipe of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4train.lab.analysis import figure as look
from fp4train.lab.analysis.figure import Draw, style
from fp4train.lab.analysis.history import Band, Floats, History, Series, read_history
from fp4train.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "curves.png"
DASHED = (0, (4, 3))

UPRIGHT = 44
"""Characters of a line of an upright name that the panel is high enough for."""
SPREAD = 3
"""The most curves whose intervals are drawn as bands."""
SETTLED = 10
"""The axis of gaps leaves out a tenth of the steps at the beginning, and of the intervals the first
half.
"""
INSIDE = 6
"""The most runs whose legend stands in the panel; that of more stands beside it."""
NAME = 36
ROW = 28
TITLE = 88
"""Characters of a line of a run's name: in a legend, beside its row, in a title."""
BAR_WORDS = 7.0
"""Points of the words in a bar."""
BAR = 0.2
BAR_LINES = 3
"""Inches of a bar with a line of words; the most lines in one."""
CHARACTERS = 14
"""Characters of words in an inch."""
BESIDE = 0.65
"""Inches beside a panel and the names of its rows."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean and interval by step; the bounds are NaN where there is no interval."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @staticmethod
    def of(series: Series) -> Curve:
        unknown = np.full(len(series), np.nan)
        return Curve(steps=series.steps, mean=series.values, low=unknown, high=unknown)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of one run, or of several that are averaged.

    Args:
        train: smoothed training loss. validation: validation loss in high precision.
        gaps: relative gaps of both to the first of the figure, in per cent; empty for the first,
            or where nothing is compared.
    """

    name: str
    train: Curve
    validation: Curve
    gaps: Sequence[Curve] = ()


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """The recipes of one run over its steps.

    Args:
        label: label of the row. index: index of the curve that the run belongs to.
        done: number of steps trained. marks: (step, matplotlib's marker).
    """

    label: str
    index: int
    bands: Sequence[Band]
    done: int
    marks: Sequence[tuple[int, str]] = ()


def over_steps(losses: Sequence[Losses], rows: Sequence[RecipeRow], *, named: bool) -> Draw:
    """Losses, gaps to the first where there are some, and the recipes of every run over one axis of
    steps.

    Args:
        named: the figure has a legend, and lines where recipes change; otherwise these stand beside
            it.
    """
    last = max(
        [1, *(step for row in rows for step in (row.done, *(stop for _, stop, _ in row.bands)))]
    )

    def draw(width: float) -> Figure:
        heights = [3.2 if named else 2.6]
        if named or any(run.gaps for run in losses):
            heights.append(1.7)
        panel_width = width
        if named and len(losses) > INSIDE:
            panel_width -= _legend_inches(losses)
        strip_of = _Strip(rows, panel_width, last)
        heights.append(strip_of.height)
        figure = look.new_figure(width, sum(heights) + 0.5)
        grid = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        loss, *gap, strip = grid[:, 0]
        _losses(loss, losses, named=named)
        for panel in gap:
            _gaps(panel, losses, named=named)
        strip_of.draw(strip)
        separated = rows if named else ()
        for row in separated:
            for start, *_ in row.bands[1:]:
                for panel in (loss, *gap):
                    panel.axvline(
                        start, color=look.colour_of(row.index), lw=0.8, linestyle=DASHED, alpha=0.7
                    )
        if named:
            look.legend_of_recipes(figure, strip_of.unnamed, int(width * CHARACTERS))
        loss.set_xlim(0, look.right_end(last))
        if width <= look.NARROW:
            for panel in grid[:, 0]:
                look.few_ticks(panel, 5, integer=True)
        return figure

    return draw


def _interval(axes: Axes, curve: Curve, index: int, count: int) -> None:
    """The interval of one of `count` curves: as a band, or where many would cover each other as a
    bar at the end.
    """
    if not np.isfinite(curve.low).any():
        return
    if count <= SPREAD:
        axes.fill_between(
            curve.steps, curve.low, curve.high, color=look.colour_of(index), alpha=0.15, linewidth=0
        )
        return
    axes.vlines(
        [curve.steps[-1] * (1 + index * 0.004)],
        curve.low[-1],
        curve.high[-1],
        color=look.colour_of(index),
        lw=0.9,
    )


def _losses(axes: Axes, losses: Sequence[Losses], *, named: bool) -> None:
    for index, run in enumerate(losses):
        train = run.train
        validation = run.validation
        colour = look.colour_of(index)
        if len(losses) <= SPREAD:
            _interval(axes, train, index, len(losses))
        label = look.name_lines(run.name, NAME)
        axes.plot(
            train.steps,
            train.mean,
            color=colour,
            linestyle=look.line_of(index),
            linewidth=1.4,
            label=label,
        )
        axes.plot(
            validation.steps, validation.mean, color=colour, linewidth=0, marker="o", markersize=3
        )
    if named:
        title = "loss (nats per token): training, smoothed; dots: validation"
    else:
        title = "loss, nats per token; dots: validation"
    drawn = [curve.mean for run in losses for curve in (run.train, run.validation)]
    look.loss_axis(axes, title, drawn)
    if named and len(losses) > INSIDE:
        axes.figure.legend(loc="outside right upper", fontsize=7.5, handlelength=2.6)
    elif named:
        axes.legend(loc="upper right", fontsize=8.5, frameon=True, framealpha=0.9, edgecolor="none")


def _gaps(axes: Axes, losses: Sequence[Losses], *, named: bool) -> None:
    settled: list[Floats] = []
    shapes: Sequence[Any] = ({"lw": 0.9, "alpha": 0.5}, {"lw": 1.4, "marker": "o", "ms": 3})
    axes.axhline(0, color=look.colour_of(0), linewidth=1.1)
    for index, run in enumerate(losses):
        for gap, shape in zip(run.gaps, shapes, strict=False):
            axes.plot(
                gap.steps,
                gap.mean,
                color=look.colour_of(index),
                linestyle=look.line_of(index),
                **shape,
            )
            bounds = len(gap) // 2
            settled += [
                gap.mean[len(gap) // SETTLED :],
                gap.low[bounds:],
                gap.high[bounds:],
            ]
        for validation in run.gaps[1:]:
            _interval(axes, validation, index, len(losses))
    if named:
        long_title = f"gap to {losses[0].name}, %: training, smoothed; bold: validation"
        title = look.name_lines(long_title, TITLE)
    else:
        title = "gap to the first, %; bold: validation"
    style(axes, title)
    axes.set_ylim(*look.gap_limits(settled))


def _legend_inches(losses: Sequence[Losses]) -> float:
    """The width of a legend beside the panels, with its lines."""
    names = "\n".join(look.name_lines(loss.name, NAME) for loss in losses)
    return 0.5 + max(map(look.inches_of, names.split("\n")))


class _Strip:
    """The recipes of every run, a row per run: what ran is filled, what is planned is dotted.

    A recipe's whole name stands in its bar where it fits there, in up to `BAR_LINES` lines.

    Args:
        width: inches of the panels with the names of their rows. last: the last step of the axis.
    """

    def __init__(self, rows: Sequence[RecipeRow], width: float, last: int) -> None:
        self.rows = rows
        self.shades = look.shades(recipe for row in rows for *_, recipe in row.bands)
        self.names = [look.name_lines(row.label, ROW) for row in rows]
        beside = max(
            (look.inches_of(line) for name in self.names for line in name.split("\n")), default=0.0
        )
        inches = (width - beside - BESIDE) / look.right_end(last)
        self.labels = [
            [_in_bar(recipe, (stop - start) * inches) for start, stop, recipe in row.bands]
            for row in rows
        ]
        """The lines in every bar of every row."""
        bands = [
            (recipe, lines)
            for row, bars in zip(rows, self.labels, strict=True)
            for (*_, recipe), lines in zip(row.bands, bars, strict=True)
        ]
        written = {recipe for recipe, lines in bands if lines}
        self.unnamed = {
            recipe: shade for recipe, shade in self.shades.items() if recipe not in written
        }
        """Recipes whose names stand in no bar."""
        most = max(
            [1, *(len(lines) for _, lines in bands), *(1 + name.count("\n") for name in self.names)]
        )
        self.height = 0.35 + len(rows) * (BAR + look.height_of(most - 1, BAR_WORDS))
        """Inches."""

    def draw(self, axes: Axes) -> None:
        for place, (row, bars) in enumerate(zip(self.rows, self.labels, strict=True)):
            for (start, stop, recipe), lines in zip(row.bands, bars, strict=True):
                ran = min(stop, max(start, row.done))
                axes.barh(
                    place,
                    ran - start,
                    left=start,
                    height=0.8,
                    linewidth=0.5,
                    **self.shades[recipe].fill,
                )
                if stop > ran:
                    axes.barh(
                        place,
                        stop - ran,
                        left=ran,
                        height=0.6,
                        color="none",
                        ec=look.QUIET,
                        ls=":",
                        lw=0.8,
                    )
                middle = (start + stop) / 2
                axes.text(
                    middle, place, "\n".join(lines), ha="center", va="center", fontsize=BAR_WORDS
                )
            for step, marker in row.marks:
                axes.plot(
                    [step], [place], marker=marker, color=look.INK, markersize=5, clip_on=False
                )
        style(axes, "recipe of every run")
        axes.grid(visible=False)
        axes.set_yticks(range(len(self.rows)), self.names, fontsize=look.WORDS)
        for tick, row in zip(axes.get_yticklabels(), self.rows, strict=True):
            tick.set_color(look.colour_of(row.index))
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.spines[["left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("step")


def _in_bar(recipe: str, inches: float) -> list[str]:
    """The lines of a recipe's name in a bar of so many inches; none where it does not fit."""
    lines = look.lines_within(recipe, inches - 0.06, BAR_WORDS)
    return lines if len(lines) <= BAR_LINES else []


def draw_curves(run_dir: Path) -> Path:
    """Draw RUN/curves.png from RUN/metrics.jsonl.

    Raises:
        UserError: not a run directory, or nothing logged yet.
    """
    history = read_history(run_dir)
    path = Path(run_dir) / CURVES
    look.save(one_run(history), look.PICTURE, path)
    return path


def one_run(history: History) -> Draw:
    """The losses of one run with the recipe of every stretch, the learning rate and the gradient
    norm.
    """

    def draw(width: float) -> Figure:
        figure = look.new_figure(width, 6.0)
        places = figure.add_gridspec(2, 2, height_ratios=(3.2, 1.0))
        loss, rate, norm = (
            figure.add_subplot(place) for place in (places[0, :], places[1, 0], places[1, 1])
        )
        _draw_loss(loss, history)
        _draw_small(rate, history.series("train/lr"), "learning rate")
        _draw_small(norm, history.series("train/grad_norm"), "gradient norm", log=True)
        bands = history.bands()
        grounds = look.shades(recipe for *_, recipe in bands)
        for axes in (loss, rate, norm):
            axes.set_xlim(0, look.right_end(history.last_step))
            if len(bands) < 2:
                continue
            for start, stop, recipe in bands:
                axes.axvspan(start, stop, alpha=0.45, lw=0, zorder=0, **grounds[recipe].fill)
        unnamed = _draw_strip(loss, bands, grounds, max(history.last_step, 1), width)
        look.legend_of_recipes(figure, unnamed, int(width * CHARACTERS))
        _mark_events(loss, history)
        title = look.name_lines(history.name, 44)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.text(0.988, 0.978, _summary(history), ha="right", va="top", fontsize=9)
        return figure

    return draw


def _draw_loss(axes: Axes, history: History) -> None:
    train = history.series("train/loss")
    smooth = train.smoothed()
    marker = "o" if len(train) <= 2 else None
    axes.plot(train.steps, train.values, color=look.TRAIN, alpha=0.28, linewidth=0.8, marker=marker)
    axes.plot(smooth.steps, smooth.values, color=look.TRAIN, linewidth=1.8, label=smoothing(train))
    drawn = [train.values]
    for key, label, colour, line in (
        ("val/loss", "validation, high precision", look.INK, "-"),
        ("val/loss_recipe", "validation, in the recipe", look.QUIET, "--"),
    ):
        series = history.series(key)
        if len(series):
            marker = "o" if len(series) <= 40 else None
            axes.plot(
                series.steps,
                series.values,
                line,
                color=colour,
                lw=1.5,
                marker=marker,
                ms=3.5,
                label=label,
            )
            drawn.append(series.values)
    look.loss_axis(axes, "loss (nats per token)", drawn, height=1.045)
    axes.set_xlabel("step", fontsize=9)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.045),
        ncols=3,
        fontsize=7.5,
        borderaxespad=0.2,
        columnspacing=1.4,
    )


def smoothing(train: Series) -> str:
    """What the line of training losses is."""
    return f"training, smoothed: the last tenth of the steps, at most {train.window}"


def _draw_small(axes: Axes, series: Series, title: str, *, log: bool = False) -> None:
    style(axes, title)
    if log and (series.values > 0).any():
        look.logarithmic(axes, fine=False)
    axes.set_xlabel("step", fontsize=9)
    if not len(series):
        axes.text(
            0.5,
            0.5,
            "not logged",
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=8,
            color=look.QUIET,
        )
        axes.set_yticks([])
        return
    axes.plot(
        series.steps,
        series.values,
        color=look.INK,
        linewidth=0.9,
        marker="o" if len(series) <= 2 else None,
    )


def _draw_strip(
    axes: Axes, bands: Sequence[Band], grounds: Mapping[str, look.Shade], last: int, width: float
) -> dict[str, look.Shade]:
    """Draw a band above the panel with the recipe of each span; return the recipes that it names
    nowhere.

    A name that is wider than its span stands upright below it, where the span has room for its
    lines.
    """
    inches = (width - BESIDE) / look.right_end(last)
    free = 0.0  # where the next upright name may begin
    named = set()
    for start, stop, recipe in bands:
        axes.axvspan(start, stop, 1.005, 1.045, lw=0, clip_on=False, **grounds[recipe].fill)
        middle = (start + stop) / 2
        place: Any = {"transform": axes.get_xaxis_transform(), "ha": "center", **look.LABEL}
        if look.inches_of(recipe) <= (stop - start) * inches:
            axes.text(middle, 1.025, recipe, va="center_baseline", **place)
            named.add(recipe)
            continue
        lines = look.name_lines(recipe, UPRIGHT).split("\n")
        reach = look.height_of(len(lines)) / inches / 2
        if middle - reach < max(free, start - 0.01 * last) or middle + reach > stop + 0.01 * last:
            continue
        free = middle + reach
        axes.text(middle, 0.98, "\n".join(lines), rotation=90, va="top", **place)
        named.add(recipe)
    return {recipe: shade for recipe, shade in grounds.items() if recipe not in named}


def _mark_events(axes: Axes, history: History) -> None:
    names: dict[int, list[str]] = {}
    for event in history.events():
        if event.name != "recipe":  # the strip shows recipes
            names.setdefault(event.step, []).append(event.name)
    for step, several in names.items():
        axes.axvline(step, color=look.INK, linewidth=0.9, linestyle=DASHED, alpha=0.6, zorder=1)
        axes.annotate(
            " · ".join(dict.fromkeys(several)),
            (step, 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(-2, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            alpha=0.8,
            **look.LABEL,
        )


def _summary(history: History) -> str:
    parts = [
        counted(history.last_step, "step"),
        f"training {history.loss('train/loss').values[-1]:.4f}",
    ]
    validation = history.series("val/loss")
    if len(validation):
        parts.append(f"validation {validation.values[-1]:.4f}")
    return "   ".join(parts)
