"""The statistics of a measured step: on their way from the device, and what a line of metrics says of them.

"FP4 All the Way" (arXiv 2505.19115) finds that quantised training becomes less effective once the norm of the gradient
falls below √3 times the norm of its quantisation noise. Both are in the statistics by layer; a run says so the first
time that it happens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4train.measure.statistics import NAMES, RAW, Measured
from fp4train.run.supervise.ledger import Numbers, Values
from fp4train.track.statistics import GRADIENT, OPERAND, Statistics

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

THRESHOLD: Final = math.sqrt(3)
"""Of the gradient's norm over that of its noise."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Statistics whose numbers are not read yet.

    Args:
        measured: where they belong; numbers: its values and noises, and the gradient norm of each layer.
        scale: from the noise of the sampled tokens to that of the step's gradient.
    """

    measured: Measured
    numbers: Numbers
    scale: float

    @classmethod
    def of(cls, measured: Measured, norms: Mapping[str, Tensor], *, tokens: int, loss_scale: float) -> Pending:
        """Of a step of `tokens` tokens over all ranks; `norms`: the gradient norm of each parameter, by name."""
        nothing = torch.full((), math.nan, device=measured.values.device)
        gradients = [norms.get(f"{name}.weight", nothing).double() for name in measured.layers]
        numbers = Numbers(torch.cat((measured.values.flatten(), measured.noise, *(g.reshape(1) for g in gradients))))
        return cls(
            measured=measured,
            numbers=numbers,
            scale=math.sqrt(tokens / max(measured.tokens, 1)) / loss_scale,
        )

    def read(self, step: int, recipe: str) -> Statistics:
        """The statistics of the step; waits for the device."""
        numbers = np.array(self.numbers.read())
        count, layers = len(self.measured.at), len(self.measured.layers)
        raw = dict(zip(RAW, numbers[: count * len(RAW)].reshape(count, len(RAW)).T, strict=True))
        operands, gradients = np.zeros(count, OPERAND), np.zeros(layers, GRADIENT)
        if count:
            operands["layer"], operands["operand"] = np.array(self.measured.at).T
        with np.errstate(divide="ignore", invalid="ignore"):
            operands["amax"] = raw["amax"]
            operands["sqnr_db"] = 10 * np.log10(raw["signal"] / raw["error"])
            operands["underflow"] = np.where(raw["nonzero"] > 0, raw["lost"] / raw["nonzero"], 0)
            operands["saturation"] = raw["clipped"] / raw["elements"]
            operands["kurtosis"] = np.where(raw["variance"] > 0, raw["fourth"] / raw["variance"] ** 2, 0)
            operands["scale_codes"] = raw["scales"] / 256
            operands["scale_min"], operands["scale_max"] = np.log2(raw["smallest_scale"]), np.log2(raw["largest_scale"])
        gradients["layer"] = np.arange(layers)
        gradients["noise"] = numbers[count * len(RAW) :][:layers] * self.scale
        gradients["gradient"] = numbers[count * len(RAW) + layers :]
        return Statistics(
            step=step,
            recipe=recipe,
            layers=tuple(self.measured.layers),
            names=NAMES,
            operands=operands,
            gradients=gradients,
        )


def summary(statistics: Statistics) -> Values:
    """The keys of a line of metrics; none where nothing is quantised."""
    rows, layers = statistics.operands, statistics.gradients
    if not len(rows):
        return {}
    worst = rows[int(np.argmin(np.nan_to_num(rows["sqnr_db"], nan=-np.inf)))]
    found: Values = {
        "error/sqnr_db": float(np.median(rows["sqnr_db"])),
        "error/sqnr_db_worst": float(worst["sqnr_db"]),
        "error/worst": f"{statistics.layers[worst['layer']]} {statistics.names[worst['operand']]}",
        **{f"error/{name}": float(rows[name].max()) for name in ("underflow", "saturation", "kurtosis")},
    }
    noisy = layers[layers["noise"] > 0]
    if len(noisy):
        noise = _norm(noisy["noise"])
        found |= {"error/noise": noise, "error/gradient_to_noise": _norm(noisy["gradient"]) / noise}
        found["error/gradient_to_noise_worst"] = float((noisy["gradient"] / noisy["noise"]).min())
    return found


def log_statistics(run: Run, statistics: Statistics) -> Values:
    """Hand them to the tracker, say it once if the gradient is lost in noise; what a line of metrics says of them."""
    values = summary(statistics)
    if not values:
        return values
    run.tracker.log_statistics(statistics)
    ratio = values.get("error/gradient_to_noise")
    if not run.weak_gradient and isinstance(ratio, float) and ratio < THRESHOLD:
        run.weak_gradient = True
        _log.warning(
            "step %d: the gradient's norm is %.2f times its quantisation noise, less than √3: quantised training "
            "becomes less effective (arXiv 2505.19115); consider a cooldown in higher precision",
            statistics.step,
            ratio,
        )
        run.tracker.log_event(statistics.step, "weak gradient", {"gradient_to_noise": ratio})
    return values


def _norm(each: NDArray[Any]) -> float:
    return float(np.sqrt(np.square(each.astype(np.float64)).sum()))
