"""Observations of a run's steps: layers that the first step calls, and statistics of operands in
measured steps.

"FP4 All the Way" (arXiv 2505.19115) finds that quantised training becomes less effective once the
norm of the gradient falls below √3 times the norm of its quantisation noise. Both are in the
statistics by layer; a run says so the first time that it happens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4train.companion import RunCompanion
from fp4train.config import Config
from fp4train.data.mixture import Mixture
from fp4train.measure.statistics import NAMES, RAW, Measured, WatchedLayers, watch as watch_operands
from fp4train.nn.called import check_called
from fp4train.nn.planned import PlannedLayer
from fp4train.precision import Recipe
from fp4train.quantize.random import MEASUREMENT, RandomKey
from fp4train.run.bits import seed_model
from fp4train.run.experts import Routed
from fp4train.run.queued import Numbers, Step, Values
from fp4train.run.step import eagerly, microbatch_share, step_rows, train_losses
from fp4train.track.statistics import GRADIENT, OPERAND, Statistics

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

THRESHOLD = math.sqrt(3)
"""Least ratio of the gradient's norm to that of its noise."""


class CalledLayers(RunCompanion):
    """Checks after the first step that each layer that the plan quantises was called in it
    (`nn.called`).
    """

    def after_step(self, run: Run, step: Step) -> None:
        """Check the first step.

        Raises:
            UserError: other code multiplies the weight of a planned layer; on every rank.
        """
        if run.course.called is None:
            return
        called = {
            module.layer.name for module in run.course.called if isinstance(module, PlannedLayer)
        }
        run.course.called = None
        names = frozenset(step.names)
        trained = {id(p) for name, p in run.model.named_parameters() if name in names}
        with run.world.same_outcome():
            check_called(
                run.course.plan,
                run.planned_layers,
                called,
                lambda layer: id(layer.weight) in trained,
            )


class PartShares(RunCompanion):
    """Logs what a mixture shows: the shares of its parts, where a stage begins and with each
    evaluation, which has the passes over them as well.
    """

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether the data of the configuration have parts."""
        return isinstance(config.data, Mixture)

    def before_step(self, run: Run) -> None:
        if run.begins_stage(run.step):
            shares = {
                name: round(share, 4) for name, share in run.shares(run.step).items() if share
            }
            _log.info("step %d: shares of the data: %s", run.step, shares)
            run.record.tracker.log_event(run.step, "stage", {"shares": shares})

    def after_evaluation(self, run: Run, values: Values) -> None:
        for name, (share, passes) in run.drawn().items():
            values |= {f"data/share/{name}": share, f"data/passes/{name}": passes}


class OperandStatistics(RunCompanion):
    """Measures the operands of every layer every `eval.errors_every` steps."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._watched: WatchedLayers | None = None
        self._weak = False
        """Whether it was said that the gradient is lost in quantisation noise."""

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether a run of this configuration measures."""
        return config.eval.errors_every > 0

    @contextmanager
    def around_step(self, run: Run, recipe: Recipe) -> Iterator[None]:
        """Watch the layers in a step that is measured."""
        self._watched = None
        if (run.step + 1) % run.config.eval.errors_every:
            yield
            return
        with watching(run, recipe) as watched:
            yield
        self._watched = watched

    def after_step(self, run: Run, step: Step) -> None:
        """Queue the statistics of a measured step behind it; on the lead they are logged once its
        numbers are known.
        """
        if self._watched is None:
            return
        norms = step.numbers.on_device[2:].double().square()
        norms = run.world.summed_over_shards(norms).sqrt()
        if not run.world.lead:
            return
        key = RandomKey(seed=run.config.run.seed, step=step.index, layer=0, operand=MEASUREMENT)
        statistics = self._watched.measure(run.course.plan.at(step.index).layers, key)
        by_name = dict(zip(step.names, norms, strict=True))
        absent = norms.new_full((), math.nan)
        gradients = torch.stack(
            [by_name.get(f"{name}.weight", absent) for name in statistics.layers] or [norms[:0]]
        )
        pending = Numbers(
            torch.cat((statistics.values.flatten(), statistics.noise, gradients.flatten()))
        )
        scale = (
            math.sqrt(run.config.train.step_tokens / max(statistics.tokens, 1)) / step.loss_scale
        )

        def log() -> Values:
            return self._log(run, statistics_of(statistics, pending, scale, step=step))

        step.late.append(log)

    def _log(self, run: Run, statistics: Statistics) -> Values:
        """Hand them to the tracker, say it once if the gradient is lost in noise; what a line of
        metrics says of them.
        """
        values = summary(statistics)
        if not values:
            return values
        run.record.tracker.log_statistics(statistics)
        ratio = values.get("error/gradient_to_noise")
        if not self._weak and isinstance(ratio, float) and ratio < THRESHOLD:
            self._weak = True
            _log.warning(
                "step %d: the gradient's norm is %.2f times its quantisation noise, less than "
                "√3: quantised training "
                "becomes less effective (arXiv 2505.19115); consider a cooldown in higher "
                "precision",
                statistics.step,
                ratio,
            )
            values_of_event = {"gradient_to_noise": ratio}
            run.record.tracker.log_event(statistics.step, "weak gradient", values_of_event)
        return values


@contextmanager
def watching(run: Run, recipe: Recipe) -> Iterator[WatchedLayers]:
    """A context in which `run.runner` queues the step that `run.step` is at, to be measured: gives
    the operands of each layer that were seen in it.

    Hooks sample the tensors of the step itself, whose numbers they do not change. In compiled
    blocks no hook would see them: there an eager pass before the step is measured.
    """
    compiled = run.config.train.compile
    with (
        eagerly(run),
        watch_operands([(module.layer, module) for module in run.planned_layers]) as watched,
    ):
        if not compiled:
            yield watched
        else:
            scaling = run.scaling()
            for _ in train_losses(
                run, recipe, step_rows(run), run.loss_scale.value * microbatch_share(run)
            ):
                pass
    if compiled:
        run.optimizer.zero_grad(set_to_none=True)
        run.load_scaling(scaling)
        if isinstance(run.model, Routed):
            run.model.fp4train_routers().seen(run.world.device)  # of the eager pass
        seed_model(run)
        yield watched


def statistics_of(measured: Measured, pending: Numbers, scale: float, *, step: Step) -> Statistics:
    """The statistics of a measured step; waits for the device.

    Args:
        measured: places of the numbers; pending: its values and noises, and the gradient norm of
            each layer.
        scale: factor from the noise of the sampled tokens to that of the step's gradient.
        step: the step.
    """
    numbers = np.array(pending.read())
    count = len(measured.at)
    layers = len(measured.layers)
    raw = dict(zip(RAW, numbers[: count * len(RAW)].reshape(count, len(RAW)).T, strict=True))
    operands = np.zeros(count, OPERAND)
    gradients = np.zeros(layers, GRADIENT)
    if count:
        operands["layer"], operands["operand"] = np.array(measured.at).T
    with np.errstate(divide="ignore", invalid="ignore"):
        operands["amax"] = raw["amax"]
        operands["sqnr_db"] = 10 * np.log10(raw["signal"] / raw["error"])
        operands["underflow"] = np.where(raw["nonzero"] > 0, raw["lost"] / raw["nonzero"], 0)
        operands["saturation"] = raw["clipped"] / raw["elements"]
        operands["kurtosis"] = np.where(
            raw["variance"] > 0, raw["fourth"] / raw["variance"] ** 2, 0
        )
        operands["scale_codes"] = raw["scales"] / 256
        operands["scale_min"], operands["scale_max"] = (
            np.log2(raw["smallest_scale"]),
            np.log2(raw["largest_scale"]),
        )
    gradients["layer"] = np.arange(layers)
    gradients["noise"] = numbers[count * len(RAW) :][:layers] * scale
    gradients["gradient"] = numbers[count * len(RAW) + layers :]
    return Statistics(
        step=step.index + 1,
        recipe=step.recipe.name,
        layers=tuple(measured.layers),
        names=NAMES,
        operands=operands,
        gradients=gradients,
    )


def summary(statistics: Statistics) -> Values:
    """The keys of a line of metrics; none where nothing is quantised."""
    rows = statistics.operands
    layers = statistics.gradients
    if not len(rows):
        return {}
    worst = rows[int(np.argmin(np.nan_to_num(rows["sqnr_db"], nan=-np.inf)))]
    values: Values = {
        "error/sqnr_db": float(np.median(rows["sqnr_db"])),
        "error/sqnr_db_worst": float(worst["sqnr_db"]),
        "error/worst": f"{statistics.layers[worst['layer']]} {statistics.names[worst['operand']]}",
        **{
            f"error/{name}": float(rows[name].max())
            for name in ("underflow", "saturation", "kurtosis")
        },
    }
    noisy = layers[layers["noise"] > 0]
    if len(noisy):
        noise = _norm(noisy["noise"])
        values |= {
            "error/noise": noise,
            "error/gradient_to_noise": _norm(noisy["gradient"]) / noise,
        }
        values["error/gradient_to_noise_worst"] = float((noisy["gradient"] / noisy["noise"]).min())
    return values


def _norm(gradient: NDArray[Any]) -> float:
    return float(np.sqrt(np.square(gradient.astype(np.float64)).sum()))
