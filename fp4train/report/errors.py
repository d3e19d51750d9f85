"""The quantisation errors of a run as arrays over layers, operands and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp4train.analysis.history import History
from fp4train.report.html import plain

METRICS: Final = ("relative_error", "sqnr_db", "underflow", "saturation", "kurtosis", "amax")


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What was measured every `eval.errors_every` steps.

    Args:
        steps: ascending. layers: in the order of the model. operands: "fprop.x", …
        values: metric → array [layer, operand, step]; NaN where nothing was measured.
    """

    steps: Sequence[int]
    layers: Sequence[str]
    operands: Sequence[str]
    values: dict[str, NDArray[np.float64]]

    def worst_operand(self, metric: str) -> NDArray[np.float64]:
        """[layer, step]: the largest value among the operands of a layer; NaN where there is none."""
        values = self.values[metric]
        return np.where(np.isnan(values).all(axis=1), np.nan, np.where(np.isnan(values), -np.inf, values).max(axis=1))


def read_errors(metrics: History) -> Errors | None:
    """The errors of a run; None where none were measured."""
    layers: dict[str, int] = {}
    operands: dict[str, int] = {}
    found: dict[tuple[str, int, int, int], float] = {}
    for line in metrics.lines:
        for key, value in line.items():
            if not key.startswith("error/") or not isinstance(value, int | float):
                continue
            parts = key.split("/")
            if len(parts) != 4 or parts[3] not in METRICS:
                continue
            layer = layers.setdefault(parts[1], len(layers))
            operand = operands.setdefault(parts[2], len(operands))
            found[parts[3], layer, operand, line["step"]] = float(value)
    if not found:
        return None
    steps = sorted({step for *_, step in found})
    place = {step: index for index, step in enumerate(steps)}
    values = {name: np.full((len(layers), len(operands), len(steps)), np.nan) for name in METRICS}
    for (name, layer, operand, step), value in found.items():
        values[name][layer, operand, place[step]] = value
    return Errors(steps=steps, layers=list(map(plain, layers)), operands=list(map(plain, operands)), values=values)
