"""The figures of studies, drawn from their results: damage by part and what sparing layers buys;
gaps of a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4train.lab.analysis import Draw, figure as look, style
from fp4train.lab.analysis.heatmap import MAP
from fp4train.lab.studies.findings import Finding, Sensitivity
from fp4train.lab.studies.results import CandidateResult, RankResult, SensitivityResult
from fp4train.lab.studies.tradeoff import common_prefix
from fp4train.text import counted, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STUDY = 10.5
"""Inches of the picture of a sensitivity."""
ROWS = 96
BARS = 16
"""Layers in the heat map, and as bars; of more, the worst are shown."""
COLOURS = {"different": look.VALIDATION, "here": "#e8a33d", "alike": look.IN_RECIPE}
"""Colours by verdict; anything else is not told apart."""
MEANINGS = {
    "different": "told apart from the reference",
    "here": "told apart on these checkpoints alone",
    "alike": "alike: the difference is smaller than the margin",
    "": "not told apart",
}
"""What the colour of a verdict means."""
HIGH = "#b9bec6"
CHECKPOINT: Any = {"linestyle": "", "marker": "|", "markersize": 9, "color": look.INK}
REFERENCE: Any = {"linestyle": "", "marker": "D", "markersize": 6, "color": look.INK}
"""The marks of a gap at one checkpoint, and of the reference."""
CANDIDATE = 34
"""Characters of a candidate's name."""


@dataclass(frozen=True)
class DamageMap:
    """nMSE above the floor [rows, columns], NaN where there is none; a line is drawn above each row
    of `cuts`.
    """

    rows: list[str]
    columns: list[str]
    damage: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    cuts: list[int]


def damage_grid(study: Sensitivity) -> DamageMap:
    """Layers × operands where single cells were measured; else blocks × the layers of a block."""
    alone = {part.what: part.nmse.mean - study.floor for part in study.of_kind("layer")}
    blocks: dict[int, list[str]] = {}
    for name in alone:
        blocks.setdefault(study.parts.layers[name].layer.block or 0, []).append(name)
    if not study.has_cells and all(len(mine) > 1 for mine in blocks.values()):
        prefixes = [common_prefix(mine) for mine in blocks.values()]
        kinds = {
            name: name.removeprefix(f"{p}.")
            for p, mine in zip(prefixes, blocks.values(), strict=True)
            for name in mine
        }
        columns = list(dict.fromkeys(kinds.values()))
        damage = np.full((len(blocks), len(columns)), np.nan)
        for row, mine in enumerate(blocks.values()):
            for name in mine:
                damage[row, columns.index(kinds[name])] = alone[name]
        return DamageMap(prefixes, columns, damage, [])
    worst = sorted(alone, key=lambda name: -alone[name])[:ROWS]
    layers = [name for name in alone if name in worst]
    operands = study.parts.operands if study.has_cells else []
    damage = np.array(
        [
            [*(study.cell(name, operand) or 0.0 for operand in operands), alone[name]]
            for name in layers
        ]
    )
    place = [study.parts.layers[name].layer.block for name in layers]
    cuts = [row for row in range(1, len(layers)) if place[row] != place[row - 1]]
    return DamageMap(layers, [*operands, "all"], damage, cuts)


def sensitivity(study: SensitivityResult, grid: DamageMap | None = None) -> Draw:
    """Damage of every layer (with a grid: a heat map; without: bars of the worst) and of every
    operand alone, and what sparing layers buys.
    """
    layers = sorted(study.of_kind("layer"), key=lambda part: -part.nmse.mean)[:BARS]
    operands = study.of_kind("operand")

    def draw(width: float) -> Figure:
        narrow = width <= look.NARROW
        heights = [0.5 + 0.17 * len(layers), 0.5 + 0.17 * len(operands), 1.7]
        if narrow:
            height = sum(heights) + 0.4
            layout: list[Any] = [["damage"], ["operands"], ["pareto"]]
        else:
            height = max(heights[0], heights[1] + heights[2]) + 0.3
            if grid is not None:
                height = max(4.6, 1.4 + 0.16 * len(grid.rows))
            layout = [["damage", "operands"], ["damage", "pareto"]]
        figure = look.new_figure(width, height)
        panels = figure.subplot_mosaic(layout, height_ratios=heights[-len(layout) :])
        damage_axes, operand_axes, pareto_axes = (
            panels[name] for name in ("damage", "operands", "pareto")
        )
        if grid is None:
            _bars(damage_axes, layers, "nMSE, one layer at a time", 22 if narrow else 34)
            _bars(operand_axes, operands, "nMSE, one operand at a time", 22)
        else:
            _damage(damage_axes, grid)
            _bars(
                operand_axes,
                operands,
                "one operand at a time, with intervals",
                22,
                study.parts["nothing"].nmse.mean,
            )
            title = (
                f"{study.name}, step {study.step}: {study.recipe}, nMSE of the gradient above "
                "the floor"
            )
            figure.suptitle(title, fontsize=10)
        _pareto(pareto_axes, study, timed=grid is not None and study.gpu is not None)
        return figure

    return draw


def _damage(axes: Axes, grid: DamageMap) -> None:
    from matplotlib.colors import LogNorm

    largest = max(float(np.nanmax(grid.damage)), 1e-12)
    shown = np.clip(grid.damage, largest * 1e-3, None)
    image = axes.imshow(
        np.ma.masked_invalid(shown), aspect="auto", cmap=MAP, norm=LogNorm(largest * 1e-3, largest)
    )
    axes.set_yticks(range(len(grid.rows)), grid.rows, fontsize=6 if len(grid.rows) > 24 else 7.5)
    axes.set_xticks(range(len(grid.columns)), grid.columns, fontsize=7, rotation=30, ha="right")
    axes.tick_params(length=0)
    for row in grid.cuts:
        axes.axhline(row - 0.5, color="white", linewidth=1.2)
    axes.spines[:].set_visible(False)
    axes.set_title("one layer at a time", pad=6, loc="left")
    look.colour_bar(axes, image, shrink=0.6, pad=0.02, format="%g")


def _bars(axes: Axes, parts: Sequence[Finding], title: str, room: int, floor: float = 0.0) -> None:
    halves = [part.nmse.half_width() or 0.0 for part in parts]
    values = [part.nmse.mean - floor for part in parts]
    axes.barh(
        range(len(parts)),
        values,
        xerr=halves,
        color=look.TRAIN,
        alpha=0.85,
        ecolor=look.QUIET,
        height=0.7,
    )
    look.row_style(axes, title, [shortened(part.what, room) for part in parts], ticks=4)
    axes.set_xlim(left=0)


def _pareto(axes: Axes, study: SensitivityResult, *, timed: bool) -> None:
    points = (*study.pareto, study.policy)
    if timed:
        *xs, x = (point.time or 0.0 for point in points)
    else:
        *xs, x = (100 * point.macs for point in points)
    axes.plot(
        xs,
        [point.nmse for point in study.pareto],
        color=look.TRAIN,
        linewidth=1.4,
        marker="o",
        markersize=3,
    )
    measured = study.policy.measured.nmse
    half = measured.half_width() or 0.0
    axes.errorbar(
        [x],
        [measured.mean],
        yerr=[half],
        color=look.VALIDATION,
        marker="D",
        markersize=4,
        capsize=3,
    )
    style(axes, "nMSE left, predicted; diamond: measured")
    look.few_ticks(axes, 5)
    axes.set_ylim(bottom=0)
    if timed:
        label = f"time relative to BF16 on {study.gpu}"
    else:
        label = "multiply-adds kept in high precision, %"
    axes.set_xlabel(label)


def ranking(study: RankResult, *, named: bool) -> Draw:
    """A row per candidate: the gap in the recipe with its 95 % interval (thick) and the interval
    that holds together with those of all other pairs (thin); a tick for each of several
    checkpoints; below, in grey, the gap in high precision; behind them the floor of the noise.

    Args:
        named: the figure says what it is of, and has numbers and spikes beside the rows; otherwise
            these stand in a table.
    """
    shown = [candidate for candidate in study.results if candidate.diverged is None]

    def draw(width: float) -> Figure:
        if named:
            height = 1.9 + 0.42 * len(shown)
        else:
            height = 0.9 + 0.34 * len(shown)
        figure = look.new_figure(width, height)
        axes = figure.subplots()
        ends = [0.0]

        def plot(values: Sequence[float], at: float, **style: Any) -> None:
            axes.plot(values, [at] * len(values), **style)
            ends.extend(values)

        for row, candidate in enumerate(shown):
            if candidate.gap is None:
                axes.plot([0], [row], **REFERENCE)
                continue
            colour = COLOURS.get(candidate.verdict, look.TRAIN)
            for gap, at, tone, size in (
                (candidate.high, row + 0.26, HIGH, 3.5),
                (candidate.gap, row, colour, 6.0),
            ):
                if gap is not None:
                    reach = gap.interval() or (gap.mean, gap.mean)
                    plot(reach, at, color=tone, linewidth=size / 2.2, solid_capstyle="butt")
                    dot = {"marker": "o", "markersize": size, "mec": "white", "mew": 0.6}
                    plot([gap.mean], at, color=tone, **dot)
            if candidate.simultaneous is not None:
                together = {"linewidth": 0.9, "alpha": 0.8, "zorder": 1}
                plot(candidate.simultaneous, row, color=colour, **together)
            if len(candidate.gaps) > 1:
                plot(candidate.gaps, row, **CHECKPOINT)
            numbers = f"{candidate.gap.show('+.5f', ' ± –')}  {candidate.group}"
            if named:
                beside = "\n".join(
                    [numbers, *(f"spikes at {place}" for place in candidate.spikes[:2])]
                )
                axes.annotate(
                    beside,
                    (1.01, row),
                    xycoords=("axes fraction", "data"),
                    va="center",
                    annotation_clip=False,
                    **look.LABEL,
                )
        spread = max(ends) - min(ends) or 1e-3
        axes.set_xlim(min(ends) - 0.25 * spread, max(ends) + 0.25 * spread)
        if study.noise is not None and (floor := study.noise.interval()) is not None:
            far = max(map(abs, floor))
            axes.axvspan(-far, far, color=look.LINE, alpha=0.4, zorder=0, linewidth=0)
        axes.axvline(0, color=look.QUIET, linewidth=1.0, zorder=1)
        narrow = width <= look.NARROW
        room = 18 if narrow else CANDIDATE
        names = [look.name_lines(candidate.name, room) for candidate in shown]
        if named:
            question = (
                f"gap to {study.reference}: {counted(study.forks, 'fork')} of "
                f"{counted(study.steps, 'step')} "
                f"{study.where}"
            )
            title = look.name_lines(question, int(width * 10))
            unit = "nats per token"
        else:
            title = ""
            unit = f"gap to {shortened(study.reference, 18)}, nats per token"
        look.row_style(axes, title, names, ticks=4 if narrow else 7)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel(unit, **look.LABEL)
        if named:
            marks = _meanings(shown, floor=study.floor is not None)
            columns = max(1, min(3, int(width / 3)))
            figure.legend(
                *zip(*marks, strict=True),
                loc="outside lower left",
                ncols=columns,
                fontsize=look.WORDS,
            )
        return figure

    return draw


def _meanings(shown: Sequence[CandidateResult], *, floor: bool) -> list[tuple[Any, str]]:
    """What is drawn of a ranking → what it means, without what the figure does not have."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    gaps = [candidate for candidate in shown if candidate.gap is not None]
    verdicts = [candidate.verdict if candidate.verdict in COLOURS else "" for candidate in gaps]
    dot = {"color": look.INK, "marker": "o"}
    kinds: list[tuple[bool, dict[str, Any], str]] = [
        (
            verdict in verdicts,
            {"color": COLOURS.get(verdict, look.TRAIN), "marker": "o", "linewidth": 2.7},
            meaning,
        )
        for verdict, meaning in MEANINGS.items()
    ]
    kinds += [
        (bool(gaps), {**dot, "linewidth": 2.7, "markersize": 4}, "gap, and its own 95% interval"),
        (
            any(candidate.simultaneous is not None for candidate in gaps),
            {"color": look.INK, "linewidth": 0.9},
            "95% interval of all pairs together",
        ),
        (
            any(candidate.high is not None for candidate in gaps),
            {"color": HIGH, "marker": "o", "linewidth": 1.6, "markersize": 3.5},
            "in high precision",
        ),
        (any(len(candidate.gaps) > 1 for candidate in gaps), CHECKPOINT, "one checkpoint"),
        (True, REFERENCE, "the reference"),
    ]
    marks: list[tuple[Any, str]] = [
        (Line2D([], [], **style), meaning) for drawn, style, meaning in kinds if drawn
    ]
    if floor:
        noise = Patch(color=look.LINE, alpha=0.4)
        marks.insert(-1, (noise, "floor of the noise, |FP32 − BF16|"))
    return marks
