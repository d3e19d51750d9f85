"""Quantisation errors by layer and step (`RUN/statistics.bin`) as arrays and as heat maps.

RUN/statistics.png has a map for each operand with its signal to quantisation noise in dB, and one
with the norm of each layer's gradient over its noise, on a scale whose middle is √3 ("FP4 All the
Way", arXiv 2505.19115).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.analysis.figure import INK, LINE, Draw, Panel, picture, plain, save
from fp4train.lab.analysis.history import Floats
from fp4train.track import read_statistics
from fp4train.track.statistics import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEATMAP = "statistics.png"
NOISE: Mapping[str, Any] = {"cmap": "RdBu", "vmin": -2.0, "vmax": 2.0}
LEAST_DB = 4.0
"""Decibels that a scale has at least: on a shorter one, equal operands would look different."""
NAMED = 48
"""Rows that are named at the axis of a map; of more, evenly chosen ones."""
STEPS = 6
"""Columns that are named of a map of steps."""
ACROSS = 4
INCHES = 4.4
"""The most maps side by side, and the width of each in a picture beside a run."""
LEAST_INCHES = 2.0
"""The least width of a map."""


class Errors:
    """Quantisation errors, measured every `eval.errors_every` steps.

    Args:
        statistics: columns of a run's statistics.
    """

    def __init__(self, statistics: Columns) -> None:
        rows = statistics.operands
        gradients = statistics.gradients
        steps, at = np.unique(rows["step"], return_inverse=True)
        layers, of_layer = _numbered(rows["layer"])
        operands, of_operand = _numbered(rows["operand"])
        shape = (len(layers), len(operands), len(steps))
        self.steps: Sequence[int] = steps.tolist()
        """The measured steps, ascending."""
        self.layers = layers
        self.operands = operands
        """Layers in the order of the model; operands "fprop.x", …"""
        self.sqnr_db: Floats = np.full(shape, np.nan)
        """[layer, operand, step]: signal to quantisation noise; NaN where nothing was measured."""
        self.sqnr_db[of_layer, of_operand, at] = rows["sqnr_db"]
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


def _numbered(names: NDArray[Any]) -> tuple[list[str], NDArray[np.intp]]:
    """The different names, in the order of their first appearance, and the number of each."""
    listed = names.tolist()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(listed))}
    return [*numbers], np.array([numbers[name] for name in listed], np.intp)


def draw_statistics(run: Path) -> Path:
    """Draw RUN/statistics.png from RUN/statistics.bin: the noise of each operand, and of the
    weights' gradients.

    Raises:
        UserError: the run has no statistics.
    """
    errors = Errors(read_statistics(run))
    path = Path(run) / HEATMAP
    across = max(map(len, statistics_rows(errors)))
    save(statistics(errors, Path(run).resolve().name), INCHES * across, path)
    return path


def statistics(errors: Errors, title: str) -> Draw:
    """The picture of what was measured: a map for each operand, and one of the gradients."""

    def draw(width: float) -> Figure:
        most = max(1, min(ACROSS, int(width / LEAST_INCHES)))
        return picture(statistics_rows(errors, most), title)(width)

    return draw


def statistics_rows(errors: Errors, most: int = ACROSS) -> list[list[Panel]]:
    """The maps, in as few rows as equal as they can be, `most` side by side: the noise of each
    operand on one scale, and that of gradients. What was not measured has no map.
    """
    noise = errors.sqnr_db
    low, high = decibels(noise)
    scale = {"cmap": "viridis", "vmin": low, "vmax": high}
    values = {f"{name}, SQNR in dB": noise[:, i] for i, name in enumerate(errors.operands)}
    scales: dict[str, Any] = dict.fromkeys(values, scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(errors.gradient_to_noise / math.sqrt(3))
    of_gradients = "log₁₀ of gradient / (√3 · its noise)"
    values[of_gradients] = ratio
    scales[of_gradients] = NOISE
    titles = [title for title in values if np.isfinite(values[title]).any()] or [*values][:1]
    across = -(-len(titles) // -(-len(titles) // most))
    return [
        [
            heat_map(
                title, values[title], errors.layers if not i else (), errors.steps, scales[title]
            )
            for i, title in enumerate(titles[start : start + across])
        ]
        for start in range(0, len(titles), across)
    ]


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


def heat_map(
    title: str,
    values: Floats,
    rows: Sequence[str],
    columns: Sequence[object],
    scale: Mapping[str, Any],
    label: str = "step",
) -> Panel:
    """A map of values [row, column], NaN where there is none.

    Args:
        rows: names; empty: they stand beside another map.
        scale: arguments of matplotlib's `imshow`.
        label: word for the columns, of which some are named; empty: all are.
    """

    def paint(axes: Axes) -> None:
        masked = np.ma.masked_invalid(values)
        image = axes.imshow(masked, aspect="auto", interpolation="none", **scale)
        axes.set_facecolor("#eceef1")
        stride = max(1, -(-len(rows) // NAMED))
        labels = [plain(name, 34) for name in rows[::stride]]
        axes.set_yticks(range(0, len(rows), stride), labels, fontsize=6.5)
        every = -(-len(columns) // STEPS) if label else 1
        names = [str(column) for column in columns[::every]]
        turned: Any = {} if label else {"rotation": 30, "ha": "right"}
        axes.set_xticks(range(0, len(columns), every), names, fontsize=7, **turned)
        axes.set_xlabel(label)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set(color=LINE, visible=True)
        ends = "neither" if "norm" in scale else "both"
        options: Any = {"pad": 0.02, "fraction": 0.06, "extend": ends, "format": "%g"}
        bar = axes.figure.colorbar(image, ax=axes, **options)
        bar.ax.tick_params(labelsize=7, colors=INK, length=2)
        bar.outline.set_visible(False)

    height = 0.75 + max(0.9, 0.15 * min(values.shape[0], NAMED))
    return Panel(title=title, height=height, paint=paint)
