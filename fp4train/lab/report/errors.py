"""The statistics of a run (`RUN/statistics.bin`) as arrays over layers, operands and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.report.html import plain
from fp4train.track import STATISTICS, read_statistics

METRICS: Final = ("sqnr_db", "underflow", "saturation", "kurtosis", "amax")
MOST = 1 << 26
"""Values of one metric; a file whose names and steps ask for more is none."""

Values = NDArray[np.float64]


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
    values: dict[str, Values]
    gradient_to_noise: Values

    @property
    def relative_error(self) -> Values:
        """‖quantised − exact‖/‖exact‖ [layer, operand, step], from the signal to noise ratio."""
        error: Values = 10 ** (-self.values["sqnr_db"] / 20)
        return error


def worst_operand(values: Values) -> Values:
    """[layer, step]: the largest value among the operands of a layer; NaN where there is none."""
    known = np.where(np.isnan(values), -np.inf, values).max(axis=1)
    return np.where(np.isnan(values).all(axis=1), np.nan, known)


def read_errors(run: Path, problems: list[str]) -> Errors | None:
    """The errors of a run; None where none were measured. What is damaged is added to `problems`.

    Raises:
        UserError: its statistics cannot be read.
    """
    if not (run / STATISTICS).exists():
        return None
    found = read_statistics(run, problems.append)
    rows, gradients = found.operands, found.gradients
    if not len(rows["step"]):
        return None
    steps, at = np.unique(rows["step"], return_inverse=True)
    layers, of_layer = _numbered(rows["layer"])
    operands, of_operand = _numbered(rows["operand"])
    shape = (len(layers), len(operands), len(steps))
    if np.prod(shape, dtype=float) > MOST:
        raise ValueError(f"{run / STATISTICS} has {len(layers)} layers, {len(operands)} operands, {len(steps)} steps")
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
        layers=list(map(plain, layers)),
        operands=list(map(plain, operands)),
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
