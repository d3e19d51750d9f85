"""The picture of `fp4train compare`: curves, gaps to the first run, and the recipe of each run over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fp4train.lab.analysis.curves import (
    INK,
    QUIET,
    SHADES,
    first_words,
    gap_limits,
    logarithmic,
    loss_limits,
    new_figure,
    plain,
    right_end,
    shortened,
    style,
)
from fp4train.lab.analysis.history import Floats, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fp4train.lab.analysis.compare import Comparison

COLOURS = ("#2f6db3", "#d9541e", "#1a936f", "#8b5fbf", "#c43d6b", "#7a6a1f", "#3b3f46", "#17a2b8")
LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
"""Each colour comes in each of these, so that 32 runs can be told apart."""
INSIDE = 6
"""Up to this many runs the legend stands in the panel; more stand beside it."""
NAME, RECIPE = 36, 44
"""Characters of a run's name and of its recipes in a table."""


def picture(comparison: Comparison) -> Figure:
    """The figure; where there are many runs the legend stands beside the panels."""
    beside = len(comparison.rows) > INSIDE
    figure = new_figure(11.5 if beside else 9.0, 6.2 + 0.18 * len(comparison.rows))
    heights = (3.0, 1.7, 0.32 + 0.2 * len(comparison.rows))
    loss, gap, strip = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    _draw_losses(loss, comparison)
    _draw_gaps(gap, comparison)
    _draw_recipes(strip, comparison)
    loss.set_xlim(0, right_end(max(row.steps for row in comparison.rows)))
    return figure


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def line_of(index: int) -> Any:
    return LINES[index // len(COLOURS) % len(LINES)]


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    smooth: list[Floats] = []
    for index, (history, row) in enumerate(zip(comparison.histories, comparison.rows, strict=True)):
        train, validation = history.series("train/loss").smoothed(), history.series("val/loss")
        axes.plot(
            train.steps,
            train.values,
            linestyle=line_of(index),
            color=colour_of(index),
            linewidth=1.5,
            alpha=0.9,
            label=plain(shortened(row.name, NAME)),
        )
        axes.plot(
            validation.steps,
            validation.values,
            color=colour_of(index),
            linewidth=0,
            marker="o",
            markersize=3.5,
        )
        smooth.append(train.values)
    style(axes, "loss (nats per token): training, smoothed; dots: validation")
    if all((values[np.isfinite(values)] > 0).all() for values in smooth):
        logarithmic(axes, fine=True)
    if limits := loss_limits(smooth):
        axes.set_ylim(*limits)
    if len(smooth) > INSIDE:
        axes.figure.legend(loc="outside right upper", fontsize=7.5, frameon=False, labelcolor=INK, handlelength=2.6)
    else:
        axes.legend(loc="upper right", fontsize=8.5, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK)


def _draw_gaps(axes: Axes, comparison: Comparison) -> None:
    first = comparison.histories[0]
    settled: list[Floats] = []
    axes.axhline(0, color=colour_of(0), linewidth=1.2)
    for index, history in enumerate(comparison.histories[1:], start=1):
        train = _gap(history.series("train/loss").smoothed(), first.series("train/loss").smoothed())
        validation = _gap(history.series("val/loss"), first.series("val/loss"))
        axes.plot(
            train.steps, train.values, color=colour_of(index), linestyle=line_of(index), linewidth=1.0, alpha=0.55
        )
        axes.plot(
            validation.steps,
            validation.values,
            color=colour_of(index),
            linestyle=line_of(index),
            linewidth=1.5,
            marker="o",
            markersize=4,
            mec="white",
        )
        settled += [series.values[len(series) // 10 :] for series in (train, validation)]
    style(axes, f"gap to {plain(shortened(comparison.rows[0].name, 48))} (%)")
    axes.set_ylim(*gap_limits(settled))


def _gap(series: Series, first: Series) -> Series:
    """In per cent, at the steps that both have."""
    steps = np.intersect1d(series.steps, first.steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Series(steps=steps, values=100 * (series.at(steps) / first.at(steps) - 1))


def _draw_recipes(axes: Axes, comparison: Comparison) -> None:
    """A row a run: its recipes over the steps."""
    spans = [history.spans() for history in comparison.histories]
    recipes = list(dict.fromkeys(span.recipe for several in spans for span in several))
    total = max(row.steps for row in comparison.rows)
    for index, several in enumerate(spans):
        for span in several:
            left = 0 if span is several[0] else span.first
            colour = SHADES[recipes.index(span.recipe) % len(SHADES)]
            axes.barh(index, span.last - left, left=left, height=0.78, color=colour, edgecolor="white", linewidth=1.0)
            room = int((span.last - left) / (0.0105 * max(total, 1)))  # characters
            label = first_words(span.recipe, room)
            axes.text((left + span.last) / 2, index, plain(label), ha="center", va="center", fontsize=7.5, color=INK)
    style(axes, "recipe")
    axes.grid(visible=False)
    axes.set_yticks(range(len(spans)), [plain(shortened(row.name, 28)) for row in comparison.rows], fontsize=7.5)
    for index, tick in enumerate(axes.get_yticklabels()):
        tick.set_color(colour_of(index))
    axes.set_ylim(len(spans) - 0.5, -0.5)
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step", fontsize=9, color=INK)
    for panel in axes.figure.axes[:2]:
        for index, several in enumerate(spans):
            for span in several[1:]:
                panel.axvline(
                    span.first,
                    color=colour_of(index) if index else QUIET,
                    linewidth=0.8,
                    linestyle=(0, (4, 3)),
                    alpha=0.7,
                )
