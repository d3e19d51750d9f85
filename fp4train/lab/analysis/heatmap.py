"""Quantisation errors by layer and step (`RUN/statistics.bin`) as arrays and as heat maps.

RUN/statistics.png has a panel for each operand with its signal to quantisation noise in dB, and one with the norm of
each layer's gradient over its noise, on a scale whose middle is √3 ("FP4 All the Way", arXiv 2505.19115). A page has
the worst operand of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.analysis.figure import INK, LINE, NARROW, QUIET, Draw, new_figure, plain, save_png, shortened
from fp4train.lab.analysis.history import Floats
from fp4train.track import read_statistics
from fp4train.track.statistics import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEATMAP = "statistics.png"
METRICS: Final = ("sqnr_db", "underflow", "saturation", "kurtosis", "amax")
MAP = "YlOrRd"
RATIO = "gradient / noise"
"""The map that has a logarithmic scale, because it spans decades, and on which small is bad."""
WORST_DB, BEST_DB = 8.0, 32.0
"""Ends of the colours: an operand as large as 2.5 times its error, and of 8-bit elements."""
LABELS = 40
"""Layers of which each has a name at the axis; of more, some have."""
LAYERS, COLUMNS = 48, 40
"""Rows and columns of a map in a page; of more layers the worst are shown, of more steps evenly chosen ones."""
MOST = 1 << 26
"""Values of one metric; a file whose names and steps ask for more is none."""
LAYER = 2000
"""Characters of a layer's name."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What was measured every `eval.errors_every` steps.

    Args:
        steps: ascending. layers: in the order of the model. operands: "fprop.x", …
        values: metric → array [layer, operand, step]; NaN where nothing was measured.
        gradient_to_noise: [layer, step]: norm of the weight gradient over that of its quantisation noise; NaN where
            no noise is added.
    """

    steps: Sequence[int]
    layers: Sequence[str]
    operands: Sequence[str]
    values: dict[str, Floats]
    gradient_to_noise: Floats

    @property
    def relative_error(self) -> Floats:
        """‖quantised − exact‖/‖exact‖ [layer, operand, step], from the signal to noise ratio."""
        error: Floats = 10 ** (-self.values["sqnr_db"] / 20)
        return error

    @property
    def worst_layers(self) -> list[int]:
        """Layers by their largest relative error at the last step that they were measured at, the worst first."""
        error = worst_operand(self.relative_error)
        last = [next((x for x in reversed(row) if np.isfinite(x)), -np.inf) for row in error]
        return sorted(range(len(last)), key=lambda i: -last[i])


def worst_operand(values: Floats) -> Floats:
    """[layer, step]: the largest value among the operands of a layer; NaN where there is none."""
    known = np.where(np.isnan(values), -np.inf, values).max(axis=1)
    return np.where(np.isnan(values).all(axis=1), np.nan, known)


def errors_of(found: Columns) -> Errors:
    """The errors of a run's statistics.

    Raises:
        ValueError: they name more layers, operands and steps than a run has.
    """
    rows, gradients = found.operands, found.gradients
    steps, at = np.unique(rows["step"], return_inverse=True)
    layers, of_layer = _numbered(rows["layer"])
    operands, of_operand = _numbered(rows["operand"])
    shape = (len(layers), len(operands), len(steps))
    if np.prod(shape, dtype=float) > MOST:
        raise ValueError(f"the statistics have {len(layers)} layers, {len(operands)} operands, {len(steps)} steps")
    values = {name: np.full(shape, np.nan) for name in METRICS}
    for name, array in values.items():
        array[of_layer, of_operand, at] = rows[name]
    ratio = np.full((len(layers), len(steps)), np.nan)
    layer_at = {name: index for index, name in enumerate(layers)}
    step_at = {step: index for index, step in enumerate(steps.tolist())}
    columns = (gradients[key].tolist() for key in ("step", "layer", "gradient", "noise"))
    for step, layer, gradient, noise in zip(*columns, strict=True):
        if noise > 0 and layer in layer_at and step in step_at:
            ratio[layer_at[layer], step_at[step]] = gradient / noise
    return Errors(
        steps=steps.tolist(),
        layers=[plain(name, LAYER) for name in layers],
        operands=[plain(name, LAYER) for name in operands],
        values=values,
        gradient_to_noise=ratio,
    )


def _numbered(names: NDArray[Any]) -> tuple[list[str], NDArray[np.intp]]:
    """The distinct names in the order in which they appear first, and for each name its place among them."""
    distinct, first, place = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return distinct[order].tolist(), rank[place]


def draw_statistics(run: Path) -> Path:
    """Draw RUN/statistics.png from RUN/statistics.bin.

    Raises:
        UserError: the run has no statistics.
    """
    found, path = errors_of(read_statistics(run)), Path(run) / HEATMAP
    panels = min(len(found.operands) + 2, 4)
    save_png(every_operand(found, Path(run).resolve().name), 4.2 * panels, path)
    return path


def every_operand(found: Errors, name: str) -> Draw:
    """The noise of each operand, and of the weights' gradients: all layers at all steps."""

    def draw(width: float) -> Figure:
        columns = min(len(found.operands) + 2, 4)
        height = -(-(len(found.operands) + 2) // columns)
        figure = new_figure(width, 0.4 + height * (1.0 + 0.13 * min(len(found.layers), LABELS)))
        figure.suptitle(shortened(name, 44), x=0.01, ha="left", fontweight="bold", color=INK)
        *panels, legend = figure.subplots(height, columns, squeeze=False).flatten()[: len(found.operands) + 2]
        for axes in figure.axes[len(found.operands) + 1 :]:
            axes.set_axis_off()
        maps = {f"{operand}, SQNR in dB": found.values["sqnr_db"][:, i] for i, operand in enumerate(found.operands)}
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log10(found.gradient_to_noise / math.sqrt(3))
        maps["log₁₀ of gradient / (√3 · its noise)"] = np.where(np.isfinite(ratio), ratio, np.nan)
        noise, gradient = (("viridis", WORST_DB, BEST_DB), "SQNR, dB"), (("RdBu", -2.0, 2.0), "gradient / noise")
        for place, (axes, (title, values)) in enumerate(zip(panels, maps.items(), strict=True)):
            (colours, low, high), of = noise if place < len(found.operands) else gradient
            image = _map(axes, values, title, found.steps, 5, cmap=colours, vmin=low, vmax=high)
            every = max(1, -(-len(found.layers) // LABELS))
            names = [shortened(layer, 26) for layer in found.layers[::every]]
            axes.set_yticks(range(0, len(found.layers), every), names, fontsize=6)
            if place >= len(found.operands) - 1:  # the last of its kind
                where = legend.inset_axes((0.05 if (colours, low, high) == noise[0] else 0.5, 0.05, 0.06, 0.85))
                bar = figure.colorbar(image, cax=where, extend="both")
                bar.ax.set_title(of, fontsize=8, color=INK, loc="left")
        return figure

    return draw


def worst_maps(found: Errors) -> Draw:
    """By layer and step: relative error and underflow of the layer's worst operand, and its gradient over its noise."""
    rows = sorted(found.worst_layers[:LAYERS])
    columns = np.unique(np.linspace(0, len(found.steps) - 1, min(len(found.steps), COLUMNS)).round().astype(int))
    steps = [found.steps[i] for i in columns]
    maps = {
        title: values[rows][:, columns]
        for title, values in (
            ("relative error", worst_operand(found.relative_error)),
            ("underflow, %", 100 * worst_operand(found.values["underflow"])),
            (RATIO, np.where(found.gradient_to_noise > 0, found.gradient_to_noise, np.nan)),
        )
    }
    if not np.isfinite(maps[RATIO]).any():
        del maps[RATIO]

    def draw(width: float) -> Figure:
        from matplotlib.ticker import LogLocator

        narrow = width <= NARROW
        height = 0.75 + max(0.9, 0.15 * len(rows))
        figure = new_figure(width, len(maps) * height if narrow else height)
        panels = figure.subplots(len(maps), 1) if narrow else figure.subplots(1, len(maps), sharey=True)
        for axes, (title, values) in zip(panels, maps.items(), strict=True):
            ratio = title == RATIO
            scale = {"cmap": f"{MAP}_r", "norm": "log"} if ratio else {"cmap": MAP}
            image = _map(axes, values, title, steps, 5 if narrow else 4, **scale)
            if narrow or axes is panels[0]:
                names = [shortened(found.layers[i], 22 if narrow else 34) for i in rows]
                axes.set_yticks(range(len(rows)), names, fontsize=6.5)
            axes.spines[:].set_color(LINE)
            bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, format="%g" if ratio else None)
            if ratio:
                bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
                bar.ax.minorticks_off()
            bar.ax.tick_params(labelsize=7, colors=INK, length=2)
            bar.outline.set_visible(False)
        return figure

    return draw


def _map(axes: Axes, values: Floats, title: str, steps: Sequence[int], ticks: int, **scale: Any) -> Any:
    """One map of [layer, step] with about so many ticks; grey, or in a page empty, where nothing was measured."""
    shown = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="none", **scale)
    axes.set_facecolor("#eceef1")
    axes.set_title(title, fontsize=9, color=INK, loc="left", pad=5)
    every = max(1, -(-len(steps) // ticks))
    axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]], fontsize=7)
    axes.tick_params(length=0, colors=INK, color=QUIET)
    axes.set_xlabel("step", fontsize=8, color=INK)
    return shown
