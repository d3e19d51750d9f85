"""Quantisation errors by layer and step (`RUN/statistics.bin`) as arrays and as heat maps.

RUN/statistics.png has a panel for each operand with its signal to quantisation noise in dB, and one
with the norm of each layer's gradient over its noise, on a scale whose middle is √3 ("FP4 All the
Way", arXiv 2505.19115). A page has the worst operand of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.analysis.figure import (
    LINE,
    NARROW,
    Draw,
    colour_bar,
    decades,
    name_lines,
    new_figure,
    plain,
    save,
)
from fp4train.lab.analysis.history import Floats
from fp4train.text import shortened
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
LEAST_DB = 4.0
"""Decibels that a scale has at least: on a shorter one, equal operands would look different."""
LAYERS = 48
COLUMNS = 40
"""Rows and columns of a map in a page; of more layers the worst are shown, of more steps evenly
chosen ones. A picture has all, and names so many layers at its axis.
"""
MOST = 1 << 26
"""Values of one metric; a file whose names and steps ask for more is none."""
WORST = 10
"""Layers in the table of the worst."""
LAYER = 2000
"""Characters of a layer's name."""


class Errors:
    """Quantisation errors, measured every `eval.errors_every` steps.

    Args:
        statistics: columns of a run's statistics.

    Raises:
        ValueError: they name more layers, operands and steps than a run has.
    """

    def __init__(self, statistics: Columns) -> None:
        rows = statistics.operands
        gradients = statistics.gradients
        steps, at = np.unique(rows["step"], return_inverse=True)
        layers, of_layer = _numbered(rows["layer"])
        operands, of_operand = _numbered(rows["operand"])
        shape = (len(layers), len(operands), len(steps))
        if np.prod(shape, dtype=float) > MOST:
            raise ValueError(
                f"the statistics have {len(layers)} layers, {len(operands)} operands, "
                f"{len(steps)} steps"
            )
        self.steps: Sequence[int] = steps.tolist()
        """The measured steps, ascending."""
        self.layers = [plain(name, LAYER) for name in layers]
        self.operands = [plain(name, LAYER) for name in operands]
        """Layers in the order of the model; operands "fprop.x", …"""
        self.values = {name: np.full(shape, np.nan) for name in METRICS}
        """Metric → array [layer, operand, step]; NaN where nothing was measured."""
        for name, array in self.values.items():
            array[of_layer, of_operand, at] = rows[name]
        self.gradient_to_noise: Floats = np.full((len(layers), len(steps)), np.nan)
        """[layer, step]: norm of the weight gradient over that of its quantisation noise; NaN where
        no noise is added.
        """
        layer_at = {name: index for index, name in enumerate(layers)}
        step_at = {step: index for index, step in enumerate(self.steps)}
        columns = (gradients[key].tolist() for key in ("step", "layer", "gradient", "noise"))
        for step, layer, gradient, noise in zip(*columns, strict=True):
            if noise > 0 and layer in layer_at and step in step_at:
                self.gradient_to_noise[layer_at[layer], step_at[step]] = gradient / noise

    @property
    def relative_error(self) -> Floats:
        """‖quantised − exact‖/‖exact‖ [layer, operand, step], from the signal to noise ratio."""
        error: Floats = 10 ** (-self.values["sqnr_db"] / 20)
        return error

    @property
    def worst_layers(self) -> list[int]:
        """Layers by their largest relative error at the last step that they were measured at, the
        worst first.
        """
        error = worst_operand(self.relative_error)
        last = [next((x for x in reversed(row) if np.isfinite(x)), -np.inf) for row in error]
        return sorted(range(len(last)), key=lambda i: -last[i])


class WorstLayer:
    """A layer when it was last measured, with its worst operand; `layer` is its place among those
    of `errors`.
    """

    def __init__(self, errors: Errors, layer: int) -> None:
        relative = errors.relative_error[layer]
        last = int(np.isfinite(relative).any(axis=0).nonzero()[0][-1])
        operand = int(np.nanargmax(relative[:, last]))
        error = relative[operand]
        ratio = float(errors.gradient_to_noise[layer, last])
        self.layer = errors.layers[layer]
        self.operand = errors.operands[operand]
        self.step = errors.steps[last]
        self.error, self.first = error[last], error[np.isfinite(error)][0]
        """Relative error then, and when it was first measured."""
        self.values = {
            name: float(values[layer, operand, last]) for name, values in errors.values.items()
        }
        """Values of the operand's last measurement, by metric."""
        self.ratio = ratio if math.isfinite(ratio) else None
        """Gradient over noise; None where no noise is added."""


def worst_when_last_measured(errors: Errors) -> list[WorstLayer]:
    """The layers with the largest errors when they were last measured, the worst first."""
    relative = errors.relative_error
    return [
        WorstLayer(errors, layer)
        for layer in errors.worst_layers[:WORST]
        if np.isfinite(relative[layer]).any()
    ]


def worst_operand(values: Floats) -> Floats:
    """[layer, step]: the largest value among the operands of a layer; NaN where there is none."""
    largest = np.where(np.isnan(values), -np.inf, values).max(axis=1)
    return np.where(np.isnan(values).all(axis=1), np.nan, largest)


def _numbered(names: NDArray[Any]) -> tuple[list[str], NDArray[np.intp]]:
    """The distinct names in the order in which they appear first, and for each name its place among
    them.
    """
    distinct, first_place, place = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first_place)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return distinct[order].tolist(), rank[place]


def draw_statistics(run: Path) -> Path:
    """Draw RUN/statistics.png from RUN/statistics.bin: the noise of each operand, and of the
    weights' gradients.

    Raises:
        UserError: the run has no statistics.
    """
    errors = Errors(read_statistics(run))
    path = Path(run) / HEATMAP
    maps = statistics_maps(errors)
    # in as few rows of at most 4 as equal as they can be
    columns = -(-len(maps) // -(-len(maps) // 4))
    save(
        draw_maps(maps, errors.layers, errors.steps, columns, Path(run).resolve().name),
        4.4 * columns,
        path,
    )
    return path


def statistics_maps(errors: Errors) -> list[HeatMap]:
    """The maps of a picture, of what was measured: the noise of each operand on one scale, and that
    of gradients.
    """
    noise = errors.values["sqnr_db"]
    low, high = decibels(noise)
    scale = {"cmap": "viridis", "vmin": low, "vmax": high}
    maps = [
        HeatMap(f"{operand}, SQNR in dB", noise[:, i], scale)
        for i, operand in enumerate(errors.operands)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(errors.gradient_to_noise / math.sqrt(3))
    maps.append(
        HeatMap(
            "log₁₀ of gradient / (√3 · its noise)",
            ratio,
            {"cmap": "RdBu", "vmin": -2.0, "vmax": 2.0},
        )
    )
    return [heat_map for heat_map in maps if np.isfinite(heat_map.values).any()] or maps[:1]


def decibels(noise: Floats) -> tuple[float, float]:
    """The ends of a scale, whole decibels: all values but the outermost hundredth at either end,
    `LEAST_DB` or more.
    """
    finite = noise[np.isfinite(noise)]
    if not len(finite):
        return 0.0, LEAST_DB
    low, high = np.percentile(finite, [1, 99])
    wider = max(0.0, LEAST_DB - (high - low)) / 2
    return math.floor(low - wider), math.ceil(high + wider)


def worst_maps(errors: Errors) -> Draw:
    """Maps by layer and step: relative error and underflow of the worst operand, and the gradient
    over its noise.
    """
    rows = sorted(errors.worst_layers[:LAYERS])
    columns = np.unique(
        np.linspace(0, len(errors.steps) - 1, min(len(errors.steps), COLUMNS)).round().astype(int)
    )
    ratio = np.where(errors.gradient_to_noise > 0, errors.gradient_to_noise, np.nan)[rows][
        :, columns
    ]
    maps = [
        HeatMap(
            "relative error", worst_operand(errors.relative_error)[rows][:, columns], {"cmap": MAP}
        ),
        HeatMap(
            "underflow, %",
            100 * worst_operand(errors.values["underflow"])[rows][:, columns],
            {"cmap": MAP},
        ),
    ]
    if np.isfinite(ratio).any():
        maps.append(HeatMap(RATIO, ratio, {"cmap": f"{MAP}_r", "norm": "log"}))
    return draw_maps(
        maps, [errors.layers[i] for i in rows], [errors.steps[i] for i in columns], len(maps)
    )


@dataclass(frozen=True)
class HeatMap:
    """Values [layer, step], NaN where there is none, in the colours of `scale` (arguments of
    `imshow`).
    """

    title: str
    values: Floats
    scale: Mapping[str, Any]


def draw_maps(
    maps: Sequence[HeatMap],
    layers: Sequence[str],
    steps: Sequence[int],
    columns: int,
    title: str = "",
) -> Draw:
    """Maps of the same layers and steps side by side, on a phone below each other; each with its
    scale.
    """

    def draw(width: float) -> Figure:
        narrow = width <= NARROW
        down = -(-len(maps) // (1 if narrow else columns))
        across = -(-len(maps) // down)
        figure = new_figure(
            width, down * (0.75 + max(0.9, 0.15 * min(len(layers), LAYERS))) + 0.3 * bool(title)
        )
        if title:
            figure.suptitle(name_lines(title, 44), x=0.01, ha="left", fontweight="bold")
        panels = _panels(figure, len(maps), across)
        layer_stride = max(1, -(-len(layers) // LAYERS))
        step_stride = max(1, -(-len(steps) // 5))
        for place, (axes, heat_map) in enumerate(zip(panels, maps, strict=True)):
            values = np.ma.masked_invalid(heat_map.values)
            image = axes.imshow(values, aspect="auto", interpolation="none", **heat_map.scale)
            axes.set_facecolor("#eceef1")
            axes.set_title(heat_map.title, loc="left")
            room = 22 if narrow else 34
            if not place % across:
                names = [shortened(layer, room) for layer in layers[::layer_stride]]
            else:
                names = []
            labelled = range(0, len(layers), layer_stride) if names else []
            axes.set_yticks(labelled, names, fontsize=6.5)
            axes.set_xticks(
                range(0, len(steps), step_stride),
                [str(step) for step in steps[::step_stride]],
                fontsize=7,
            )
            axes.set_xlabel("step")
            axes.tick_params(length=0)
            axes.spines[:].set(color=LINE, visible=True)
            ratio = heat_map.scale.get("norm") == "log"
            ends = "both" if "vmin" in heat_map.scale else "neither"
            form = "%g" if ratio else None
            bar = colour_bar(axes, image, pad=0.02, fraction=0.06, format=form, extend=ends)
            if ratio:
                bar.ax.yaxis.set_major_locator(decades(numticks=8))
                bar.ax.minorticks_off()
        return figure

    return draw


def _panels(figure: Figure, count: int, across: int) -> list[Axes]:
    """So many panels in rows of `across`; those of a shorter last row are wider, so that no place
    stays empty.
    """
    rows = [range(start, min(start + across, count)) for start in range(0, count, across)]
    columns = math.lcm(*map(len, rows))
    layout: list[Any] = [[f"{i}" for i in row for _ in range(columns // len(row))] for row in rows]
    return list(figure.subplot_mosaic(layout).values())
