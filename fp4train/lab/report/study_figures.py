"""The figures of studies: damage by part and the Pareto curve of a sensitivity, the gaps of a ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fp4train.lab.analysis.curves import INK, QUIET, TRAIN, VALIDATION, new_figure, shortened, style
from fp4train.lab.report.studies import Interval, Part, RankingResult, SensitivityResult
from fp4train.lab.report.svg import LINE, NARROW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = 16
"""Layers that are drawn, the worst first."""
COLOURS = {"apart": VALIDATION, "here": "#e8a33d", "alike": "#1a936f"}
"""By verdict; anything else is not told apart."""


def sensitivity(found: SensitivityResult) -> Callable[[float], Figure]:
    """Damage of the worst layers and of every operand alone, and what sparing layers buys."""
    layers = sorted(found.of_kind("layer"), key=lambda part: -part.nmse.mean)[:BARS]
    operands = found.of_kind("operand")

    def draw(width: float) -> Figure:
        narrow = width <= NARROW
        heights = [0.5 + 0.17 * len(layers), 0.5 + 0.17 * len(operands), 1.7]
        if narrow:
            figure = new_figure(width, sum(heights) + 0.4)
            panels = list(figure.subplots(3, 1, gridspec_kw={"height_ratios": heights}))
        else:
            figure = new_figure(width, max(heights[0], heights[1] + heights[2]) + 0.3)
            places = figure.add_gridspec(2, 2, height_ratios=heights[1:])
            panels = [figure.add_subplot(place) for place in (places[:, 0], places[0, 1], places[1, 1])]
        _bars(panels[0], layers, "nMSE, one layer at a time", 22 if narrow else 34)
        _bars(panels[1], operands, "nMSE, one operand at a time", 22)
        _pareto(panels[2], found)
        return figure

    return draw


def _bars(axes: Axes, parts: Sequence[Part], title: str, room: int) -> None:
    halves = [part.nmse.half or 0.0 for part in parts]
    values = [part.nmse.mean for part in parts]
    axes.barh(range(len(parts)), values, xerr=halves, color=TRAIN, alpha=0.85, ecolor=QUIET, height=0.7)
    names = [shortened(part.name.partition("/")[2] or part.name, room) for part in parts]
    _rows(axes, names, title)
    axes.set_xlim(left=0)


def _rows(axes: Axes, names: Sequence[str], title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    style(axes, title)
    axes.grid(visible=False)
    axes.grid(axis="x", color=LINE, linewidth=0.6, alpha=0.6)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _pareto(axes: Axes, found: SensitivityResult) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.plot([100 * x for x, _ in found.pareto], [y for _, y in found.pareto], color=TRAIN, marker="o", markersize=2.5)
    half = found.measured.half or 0.0
    axes.errorbar(
        [100 * found.kept], [found.measured.mean], yerr=[half], color=VALIDATION, marker="D", markersize=4, capsize=3
    )
    style(axes, "nMSE left; diamond: measured")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("multiply-adds kept in high precision, %", fontsize=8, color=INK)


def ranking(found: RankingResult) -> Callable[[float], Figure]:
    """The gap of every candidate to the reference, with its interval, over the floor of the noise."""
    shown = [each for each in found.candidates if each.gap is not None]

    def draw(width: float) -> Figure:
        figure = new_figure(width, 0.85 + 0.28 * len(shown))
        axes = figure.subplots()
        if found.floor is not None:
            low, high = _bounds(found.floor)
            reach = max(abs(low), abs(high))
            axes.axvspan(-reach, reach, color=LINE, alpha=0.5, linewidth=0)
        axes.axvline(0, color=QUIET, linewidth=0.9)
        for row, each in enumerate(shown):
            assert each.gap is not None
            colour, half = COLOURS.get(each.verdict, TRAIN), each.gap.half
            axes.errorbar(
                [each.gap.mean],
                [row],
                xerr=None if half is None else [half],
                color=colour,
                marker="o",
                markersize=4.5,
                capsize=3,
                linewidth=1.4,
            )
        _rows(axes, [shortened(each.name, 18 if width <= NARROW else 40) for each in shown], "")
        axes.set_xlabel(f"gap to {shortened(found.reference, 18)}, nats per token", fontsize=8, color=INK)
        return figure

    return draw


def _bounds(found: Interval) -> tuple[float, float]:
    return (found.mean, found.mean) if found.low is None or found.high is None else (found.low, found.high)
