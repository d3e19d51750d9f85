"""RUN/statistics.png: layers × measured steps, in colours: noise of each operand, and of the weights' gradients.

One panel for each of the six operands with its signal to quantisation noise in dB, and one with the norm of each
layer's gradient over its noise, on a scale whose middle is √3 ("FP4 All the Way", arXiv 2505.19115).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.analysis.curves import INK, QUIET, new_figure, plain, save_figure, shortened
from fp4train.track import read_statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEATMAP = "statistics.png"
WORST_DB, BEST_DB = 8.0, 32.0
"""Ends of the colours: an operand as large as 2.5 times its error, and of 8-bit elements."""
LABELS = 40
"""Layers of which each has a name at the axis; of more, some have."""


def draw_statistics(run: Path) -> Path:
    """Draw RUN/statistics.png from RUN/statistics.bin.

    Raises:
        UserError: the run has no statistics.
    """
    found = read_statistics(run)
    layers = list(dict.fromkeys(found.operands["layer"].tolist()))
    steps = np.unique(found.operands["step"])
    operands = list(dict.fromkeys(found.operands["operand"].tolist()))
    columns = min(len(operands) + 2, 4)
    height = -(-(len(operands) + 2) // columns)
    figure = new_figure(4.2 * columns, 0.4 + height * (1.0 + 0.13 * min(len(layers), LABELS)))
    figure.suptitle(plain(shortened(Path(run).resolve().name, 44)), x=0.01, ha="left", fontweight="bold", color=INK)
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    for each in axes[len(operands) + 1 :]:
        each.set_axis_off()
    legend = axes[len(operands) + 1]
    for panel, operand in zip(axes, operands, strict=False):
        rows = {key: values[found.operands["operand"] == operand] for key, values in found.operands.items()}
        table = grid(rows, rows["sqnr_db"], layers, steps)
        shown = _draw(panel, f"{operand}, SQNR in dB", table, layers, steps, "viridis", WORST_DB, BEST_DB)
        if operand == operands[-1]:
            bar = figure.colorbar(shown, cax=legend.inset_axes((0.05, 0.05, 0.06, 0.85)), extend="both")
            bar.ax.set_title("SQNR, dB", fontsize=8, color=INK, loc="left")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(found.gradients["gradient"] / found.gradients["noise"] / math.sqrt(3))
    table = grid(found.gradients, np.where(np.isfinite(ratio), ratio, np.nan), layers, steps)
    title = "log₁₀ of gradient / (√3 · its noise)"
    shown = _draw(axes[len(operands)], title, table, layers, steps, "RdBu", -2.0, 2.0)
    bar = figure.colorbar(shown, cax=legend.inset_axes((0.5, 0.05, 0.06, 0.85)), extend="both")
    bar.ax.set_title("gradient / noise", fontsize=8, color=INK, loc="left")
    return save_figure(figure, Path(run) / HEATMAP)


def grid(
    rows: Mapping[str, NDArray[Any]], values: NDArray[Any], layers: list[str], steps: NDArray[Any]
) -> NDArray[np.float64]:
    """`values` of rows as [layers, steps]; NaN where a layer was not measured in a step."""
    table = np.full((len(layers), len(steps)), np.nan)
    order = {layer: index for index, layer in enumerate(layers)}
    at = [order[layer] for layer in rows["layer"].tolist()]
    table[at, np.searchsorted(steps, rows["step"])] = values
    return table


def _draw(
    axes: Axes,
    title: str,
    table: NDArray[np.float64],
    layers: list[str],
    steps: NDArray[Any],
    colours: str,
    low: float,
    high: float,
) -> Any:
    from matplotlib.ticker import MaxNLocator

    shown = axes.imshow(table, aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=high)
    axes.set_title(title, fontsize=9, color=INK, loc="left", pad=5)
    axes.set_facecolor("#eceef1")
    every = -(-len(layers) // LABELS)
    axes.set_yticks(range(0, len(layers), every), [shortened(name, 26) for name in layers[::every]], fontsize=6)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda x, _: str(steps[int(x)]) if 0 <= x < len(steps) else "")
    axes.tick_params(length=2, color=QUIET, labelsize=6)
    axes.set_xlabel("step", fontsize=8, color=INK)
    return shown
