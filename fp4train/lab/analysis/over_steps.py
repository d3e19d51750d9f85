"""The picture of several runs over steps: their losses, the gaps to the first, and the recipe of
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4train.lab.analysis import figure as look
from fp4train.lab.analysis.figure import Draw, style
from fp4train.lab.analysis.history import Band, Floats, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of one run, or of several that are averaged.

    Args:
        train: smoothed training loss. validation: validation loss in high precision.
        gaps: relative gaps of both to the first of the figure, in per cent; empty for the first,
            or where nothing is compared.
    """

    name: str
    train: Series
    validation: Series
    gaps: Sequence[Series] = ()


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
        strip_of = RecipeStrip(rows, panel_width, last)
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
                        start,
                        color=look.colour_of(row.index),
                        lw=0.8,
                        linestyle=look.DASHED,
                        alpha=0.7,
                    )
        if named:
            look.legend_of_recipes(figure, strip_of.unnamed, int(width * look.CHARACTERS))
        loss.set_xlim(0, look.right_end(last))
        if width <= look.NARROW:
            for panel in grid[:, 0]:
                look.few_ticks(panel, 5, integer=True)
        return figure

    return draw


def _interval(axes: Axes, curve: Series, index: int, count: int) -> None:
    """The interval of one of `count` curves: as a band, or where many would cover each other as a
    bar at the end.
    """
    if curve.bounds is None or not np.isfinite(curve.bounds[0]).any():
        return
    low, high = curve.bounds
    colour = look.colour_of(index)
    if count <= SPREAD:
        axes.fill_between(curve.steps, low, high, color=colour, alpha=0.15, linewidth=0)
        return
    end = curve.steps[-1] * (1 + index * 0.004)
    axes.vlines([end], low[-1], high[-1], color=colour, lw=0.9)


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
            train.values,
            color=colour,
            linestyle=look.line_of(index),
            linewidth=1.4,
            label=label,
        )
        axes.plot(
            validation.steps, validation.values, color=colour, linewidth=0, marker="o", markersize=3
        )
    if named:
        title = "loss (nats per token): training, smoothed; dots: validation"
    else:
        title = "loss, nats per token; dots: validation"
    drawn = [curve.values for run in losses for curve in (run.train, run.validation)]
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
                gap.values,
                color=look.colour_of(index),
                linestyle=look.line_of(index),
                **shape,
            )
            settled.append(gap.values[len(gap) // SETTLED :])
            settled += [bound[len(gap) // 2 :] for bound in gap.bounds or ()]
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


class RecipeStrip:
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
        inches = (width - beside - look.BESIDE) / look.right_end(last)
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
        style(axes, "recipe of every run" if len(self.rows) > 1 else "recipe")
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
