"""The figures of runs: losses, gaps and recipes over one axis of steps; quantisation errors by layer and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.analysis.curves import (
    INK,
    QUIET,
    SHADES,
    first_words,
    gap_limits,
    logarithmic,
    loss_limits,
    new_figure,
    right_end,
    shortened,
    style,
)
from fp4train.lab.analysis.picture import colour_of, line_of
from fp4train.lab.report.errors import Errors, worst_operand
from fp4train.lab.report.gaps import Curve, Group, curve, gap_curve
from fp4train.lab.report.html import plain
from fp4train.lab.report.sources import Source
from fp4train.lab.report.svg import LINE, NARROW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


HEAT = "YlOrRd"
RATIO = "gradient / noise"
"""The map that has a logarithmic scale, because it spans decades, and on which small is bad."""
LAYERS, COLUMNS = 48, 40
"""Rows and columns of a heat map; of more layers the worst are shown, of more steps evenly chosen ones."""
BANDS = 3
"""Up to this many groups have their intervals as bands."""
NAME = 120
"""Characters of a recipe's name."""
SETTLED = 10
"""The axis of gaps leaves out a tenth of the steps at the beginning, and of the intervals the first half."""
MARKS = {"swap": "v", "resume": "|", "branch": "|", "init": "|", "non-finite": "x"}
"""What is marked on the band of a run."""


def recipe_names(sources: Sequence[Source]) -> list[str]:
    """All recipes of the runs in order of appearance; the place of one chooses its colour."""
    return list(dict.fromkeys(recipe for source in sources for *_, recipe in bands(source)))


def bands(source: Source) -> list[tuple[int, int, str]]:
    """(first step, step after the last, recipe): from the history, or where there is none from the metrics."""
    if source.stretches:
        return [(s.start, s.stop, plain(s.recipe, NAME)) for s in source.stretches]
    spans = source.metrics.spans()
    return [(0 if span is spans[0] else span.first, span.last, plain(span.recipe, NAME)) for span in spans]


def time_axis(groups: Sequence[Group], gaps_of: str | None) -> Callable[[float], Figure]:
    """Losses, gaps to the first group (where `gaps_of` names a loss), and the recipes of every run."""
    sources = sorted((source for each in groups for source in each.sources), key=lambda source: source.number)

    def draw(width: float) -> Figure:
        with_gaps = gaps_of is not None and len(groups) > 1
        strip = 0.35 + 0.19 * len(sources)
        heights = [2.6, *([1.7] if with_gaps else []), strip]
        figure = new_figure(width, sum(heights) + 0.5)
        grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
        panels: list[Axes] = list(grid[:, 0])
        _losses(panels[0], groups)
        if with_gaps:
            _gaps(panels[1], groups)
        _bands(panels[-1], sources, width)
        panels[0].set_xlim(0, right_end(max(bands(s)[-1][1] if bands(s) else s.done for s in sources)))
        if width <= NARROW:
            _thin(panels)
        return figure

    return draw


def _thin(panels: Sequence[Axes]) -> None:
    from matplotlib.ticker import MaxNLocator

    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _shade(axes: Axes, found: Curve, index: int, count: int) -> None:
    """The interval of one of `count` groups: as a band, or where many would cover each other as a bar at the end."""
    if not np.isfinite(found.low).any():
        return
    if count <= BANDS:
        axes.fill_between(found.steps, found.low, found.high, color=colour_of(index), alpha=0.15, linewidth=0)
        return
    axes.vlines([found.steps[-1] * (1 + index * 0.004)], found.low[-1], found.high[-1], color=colour_of(index), lw=0.9)


def _losses(axes: Axes, groups: Sequence[Group]) -> None:
    shown = []
    for index, group in enumerate(groups):
        train, validation = curve(group, "train/loss"), curve(group, "val/loss")
        if len(groups) <= BANDS:
            _shade(axes, train, index, len(groups))
        axes.plot(train.steps, train.mean, color=colour_of(index), linestyle=line_of(index), linewidth=1.3)
        axes.plot(validation.steps, validation.mean, color=colour_of(index), linewidth=0, marker="o", markersize=3)
        shown.append(train.mean)
    style(axes, "loss, nats per token; dots: validation")
    if all((values[np.isfinite(values)] > 0).all() for values in shown):
        logarithmic(axes, fine=True)
    if limits := loss_limits(shown):
        axes.set_ylim(*limits)


def _gaps(axes: Axes, groups: Sequence[Group]) -> None:
    first = groups[0]
    settled: list[NDArray[np.float64]] = []
    axes.axhline(0, color=colour_of(0), linewidth=1.1)
    for index, group in enumerate(groups[1:], start=1):
        train, validation = (gap_curve(first, group, key) for key in ("train/loss", "val/loss"))
        axes.plot(train.steps, train.mean, color=colour_of(index), linestyle=line_of(index), linewidth=0.8, alpha=0.5)
        _shade(axes, validation, index, len(groups))
        axes.plot(
            validation.steps,
            validation.mean,
            color=colour_of(index),
            linestyle=line_of(index),
            linewidth=1.4,
            marker="o",
            markersize=3,
        )
        for found in (train, validation):
            bounds = len(found) // 2
            settled += [found.mean[len(found) // SETTLED :], found.low[bounds:], found.high[bounds:]]
    style(axes, "gap to the first, %; bold: validation")
    axes.set_ylim(*gap_limits(settled))


def _bands(axes: Axes, sources: Sequence[Source], width: float) -> None:
    recipes = recipe_names(sources)
    total = max([1, *(stop for source in sources for _, stop, _ in bands(source))])
    for row, source in enumerate(sources):
        for start, stop, recipe in bands(source):
            colour = SHADES[recipes.index(recipe) % len(SHADES)]
            ran = min(stop, max(start, source.done))
            axes.barh(row, ran - start, left=start, height=0.8, color=colour, edgecolor=LINE, linewidth=0.5)
            if stop > ran:
                axes.barh(
                    row, stop - ran, left=ran, height=0.6, color="none", edgecolor=QUIET, linestyle=":", linewidth=0.8
                )
            room = int((stop - start) / total * width * 11)  # characters
            axes.text(
                (start + stop) / 2, row, first_words(recipe, room), ha="center", va="center", fontsize=7, color=INK
            )
        marks = [(record.event, record.step) for record in source.records if record.step]
        marks += [(event.name, event.step) for event in source.metrics.events() if event.name == "non-finite"]
        for name, step in marks:
            if name in MARKS:
                axes.plot([step], [row], marker=MARKS[name], color=INK, markersize=5, clip_on=False)
    style(axes, "recipe of every run")
    axes.grid(visible=False)
    axes.set_yticks(range(len(sources)), [str(source.number) for source in sources], fontsize=7)
    axes.set_ylim(len(sources) - 0.5, -0.5)
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step", fontsize=8, color=INK)


def heat_maps(errors: Errors) -> Callable[[float], Figure]:
    """By layer and step: relative error and underflow of the layer's worst operand, and its gradient over its noise."""
    rows = sorted(worst_layers(errors)[:LAYERS])
    columns = np.unique(np.linspace(0, len(errors.steps) - 1, min(len(errors.steps), COLUMNS)).round().astype(int))
    steps = [str(errors.steps[i]) for i in columns]
    maps = {
        title: values[rows][:, columns]
        for title, values in (
            ("relative error", worst_operand(errors.relative_error)),
            ("underflow, %", 100 * worst_operand(errors.values["underflow"])),
            (RATIO, np.where(errors.gradient_to_noise > 0, errors.gradient_to_noise, np.nan)),
        )
    }
    if not np.isfinite(maps[RATIO]).any():
        del maps[RATIO]

    def draw(width: float) -> Figure:
        narrow = width <= NARROW
        height = 0.75 + max(0.9, 0.15 * len(rows))
        figure = new_figure(width, len(maps) * height if narrow else height)
        panels = figure.subplots(len(maps), 1) if narrow else figure.subplots(1, len(maps), sharey=True)
        for panel, (title, values) in zip(panels, maps.items(), strict=True):
            _map(panel, values, title, steps, every=-(-len(steps) // (5 if narrow else 4)))
            if narrow or panel is panels[0]:
                names = [shortened(errors.layers[i], 22 if narrow else 34) for i in rows]
                panel.set_yticks(range(len(rows)), names, fontsize=6.5)
        return figure

    return draw


def _map(axes: Axes, values: NDArray[np.float64], title: str, steps: Sequence[str], *, every: int) -> None:
    from matplotlib.ticker import LogLocator

    ratio = title == RATIO
    image = axes.imshow(
        np.ma.masked_invalid(values),
        aspect="auto",
        cmap=f"{HEAT}_r" if ratio else HEAT,
        norm="log" if ratio else None,
        interpolation="none",
    )
    axes.set_xticks(range(0, len(steps), every), steps[::every], fontsize=7)
    axes.set_xlabel("step", fontsize=8, color=INK)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_color(LINE)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, format="%g" if ratio else None)
    if ratio:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    bar.outline.set_visible(False)


def worst_layers(errors: Errors) -> list[int]:
    """Layers by their largest relative error at the last step that they were measured at, the worst first."""
    error = worst_operand(errors.relative_error)
    last = [next((x for x in reversed(row) if np.isfinite(x)), -np.inf) for row in error]
    return sorted(range(len(last)), key=lambda i: -last[i])
