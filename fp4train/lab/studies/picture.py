"""The picture of a sensitivity study: damage by layer and operand as a heat map, and what sparing layers buys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp4train.lab.analysis.curves import INK, QUIET, TRAIN, VALIDATION, new_figure, plain, style
from fp4train.lab.studies.parts import LAYER, OPERAND
from fp4train.lab.studies.summary import Report
from fp4train.lab.studies.tradeoff import common_prefix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from fp4train.lab.studies.findings import Sensitivity

MAP = "YlOrRd"
ROWS = 96
"""Layers in the heat map; of more, the worst are shown."""


def picture(report: Report) -> Figure:
    """Heat map of the layers on the left; on the right the operands and the Pareto curve."""
    found = report.found
    grid = damage_grid(found)
    figure = new_figure(10.5, max(4.6, 1.4 + 0.16 * len(grid.rows)))
    places = figure.add_gridspec(2, 2, width_ratios=(1.1, 1.0))
    _draw_map(figure.add_subplot(places[:, 0]), grid)
    _draw_operands(figure.add_subplot(places[0, 1]), found)
    _draw_curve(figure.add_subplot(places[1, 1]), report)
    title = f"{report.subject.name}, step {report.subject.step}: {found.parts.recipe.name}"
    figure.suptitle(plain(f"{title}, nMSE of the gradient above the floor"), fontsize=10, color=INK)
    return figure


@dataclass(frozen=True)
class Grid:
    """nMSE above the floor [rows, columns], NaN where there is none; a line is drawn above each row of `cuts`."""

    rows: list[str]
    columns: list[str]
    damage: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    cuts: list[int]


def damage_grid(found: Sensitivity) -> Grid:
    """Layers × operands where single cells were measured; else blocks × the layers of a block."""
    alone = {each.what: each.nmse.mean - found.floor for each in found.of_kind(LAYER)}
    blocks: dict[int, list[str]] = {}
    for name in alone:
        blocks.setdefault(found.parts.layers[name].layer.block or 0, []).append(name)
    if not found.has_cells and all(len(mine) > 1 for mine in blocks.values()):
        prefixes = [common_prefix(mine) for mine in blocks.values()]
        kinds = {
            name: name.removeprefix(f"{p}.") for p, mine in zip(prefixes, blocks.values(), strict=True) for name in mine
        }
        columns = list(dict.fromkeys(kinds.values()))
        damage = np.full((len(blocks), len(columns)), np.nan)
        for row, mine in enumerate(blocks.values()):
            for name in mine:
                damage[row, columns.index(kinds[name])] = alone[name]
        return Grid(prefixes, columns, damage, [])
    layers = list(alone)
    if len(layers) > ROWS:
        worst = sorted(layers, key=lambda name: -alone[name])[:ROWS]
        layers = [name for name in layers if name in worst]
    operands = found.parts.operands if found.has_cells else []
    damage = np.array([[*(found.cell(name, operand) or 0.0 for operand in operands), alone[name]] for name in layers])
    place = [found.parts.layers[name].layer.block for name in layers]
    cuts = [row for row in range(1, len(layers)) if place[row] != place[row - 1]]
    return Grid(layers, [*operands, "all"], damage, cuts)


def _draw_map(axes: Axes, grid: Grid) -> None:
    from matplotlib.colors import LogNorm

    largest = max(float(np.nanmax(grid.damage)), 1e-12)
    shown = np.clip(grid.damage, largest * 1e-3, None)
    image = axes.imshow(np.ma.masked_invalid(shown), aspect="auto", cmap=MAP, norm=LogNorm(largest * 1e-3, largest))
    axes.set_yticks(
        range(len(grid.rows)), [plain(name) for name in grid.rows], fontsize=6 if len(grid.rows) > 24 else 7.5
    )
    axes.set_xticks(
        range(len(grid.columns)), [plain(name) for name in grid.columns], fontsize=7, rotation=30, ha="right"
    )
    axes.tick_params(length=0, colors=INK)
    for row in grid.cuts:
        axes.axhline(row - 0.5, color="white", linewidth=1.2)
    axes.spines[:].set_visible(False)
    axes.set_title("one layer at a time", fontsize=9, color=INK, loc="left")
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02)
    bar.ax.tick_params(labelsize=7, colors=INK)
    bar.outline.set_visible(False)


def _draw_operands(axes: Axes, found: Sensitivity) -> None:
    each = found.of_kind(OPERAND)
    halves = [finding.nmse.half_width() or 0.0 for finding in each]
    values = [finding.nmse.mean - found.floor for finding in each]
    axes.barh(range(len(each)), values, xerr=halves, color=TRAIN, alpha=0.85, ecolor=QUIET, height=0.7)
    style(axes, "one operand at a time, with intervals")
    axes.grid(visible=False)
    axes.set_yticks(range(len(each)), [finding.what for finding in each], fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(_few())
    axes.set_xlim(left=0)


def _draw_curve(axes: Axes, report: Report) -> None:
    trade, timed = report.trade, report.trade.gpu is not None
    xs = [(point.time or 0.0) if timed else 100 * point.macs for point in trade.curve]
    axes.plot(xs, [point.nmse for point in trade.curve], color=TRAIN, linewidth=1.4, marker="o", markersize=3)
    if report.judged is not None:
        x = (trade.chosen.time or 0.0) if timed else 100 * trade.chosen.macs
        mean, half = report.judged.chosen.nmse.mean, report.judged.chosen.nmse.half_width() or 0.0
        axes.errorbar([x], [mean], yerr=[half], color=VALIDATION, marker="D", markersize=5, capsize=3)
        label = "measured, other batches"
        axes.annotate(label, (x, mean), (6, 6), textcoords="offset points", fontsize=8, color=VALIDATION)
    style(axes, "nMSE left, predicted, against what is kept in high precision")
    axes.xaxis.set_major_locator(_few())
    axes.set_ylim(bottom=0)
    axes.set_xlabel(
        f"time relative to BF16 on {trade.gpu}" if timed else "multiply-adds kept (%)", fontsize=8, color=INK
    )


def _few() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator as Locator

    return Locator(6)
