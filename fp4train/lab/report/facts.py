"""Facts about the runs of a report: what differs in their data, configuration and environment; weak
gradients; cost.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf

from fp4train.config import to_config
from fp4train.config.binding import flattened
from fp4train.data.source import planned_vocab_size
from fp4train.errors import UserError
from fp4train.hardware import Device, Gpu
from fp4train.lab.analysis.compare import differing_values
from fp4train.lab.costs import CostEstimate, estimate
from fp4train.lab.report.sources import UNREADABLE, RunSource
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model, build_plan
from fp4train.run.observe import THRESHOLD
from fp4train.run.record import directory as run_directory
from fp4train.run.record.stretches import multiplied
from fp4train.run.record.trust import check_paths
from fp4train.run.timeline import build_timeline
from fp4train.text import as_written, first_line, ranges

LARGEST = 1 << 20
"""A model with a larger number in its configuration is none."""
MOST_ROWS = 1 << 40
"""A batch of more sequences is none."""
_CACHE = ".cache_dir"
"""The end of keys that say where a source keeps its tokens."""

ByRuns = list[tuple[str, str]]
"""Distinct values, each with the numbers of its runs; without numbers where all runs have it."""


def predict(
    sources: Sequence[RunSource], gpu: Gpu
) -> tuple[dict[RunSource, CostEstimate], list[str]]:
    """The runs that can be estimated, and a sentence for each that cannot."""
    estimates: dict[RunSource, CostEstimate] = {}
    problems: list[str] = []
    for source in sources:
        try:
            estimates[source] = _predicted_time(source, gpu)
        except UNREADABLE as error:
            problems.append(
                f"{source.name}: its time on {gpu} is not estimated: {first_line(error)}"
            )
    return estimates, problems


def _predicted_time(source: RunSource, gpu: Gpu) -> CostEstimate:
    path = source.metrics.path
    for key, value in source.config.items():
        if key.startswith("model.") and isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{key}={value} is no size of a model")
    saved = run_directory.read_trained(path)
    # All that the estimate reads of the data is the size of the vocabulary.
    check_paths(
        OmegaConf.create({"resume": str(path), "data": {"tokenizer": saved.data.get("tokenizer")}}),
        (),
    )
    config = to_config(saved)
    model = build_model(config, planned_vocab_size(config.data), torch.device("meta"))
    plan = build_plan(
        config, find_layers(model), build_timeline(config, path), Device.elsewhere(gpu)
    )
    return estimate(plan, gpu, microbatches=config.train.microbatches)


class RunCost:
    """Tokens, time and arithmetic of a run; NaN or None where it is not known."""

    def __init__(self, source: RunSource) -> None:
        tokens, speed, mfu = map(
            source.metrics.series, ("train/tokens", "perf/tokens_per_s", "perf/mfu")
        )
        self.tokens = float(tokens.values[-1]) if len(tokens) else math.nan
        self.seconds: float | None = None
        """Seconds of all steps."""
        if len(speed) > 1 and len(tokens) and (speed.values > 0).all():
            seconds = self.tokens / len(speed) * float(np.sum(1 / speed.values))
            self.seconds = seconds if math.isfinite(seconds) else None
        self.mfu = float(np.median(mfu.values)) if len(mfu) else None
        """Share of the GPU's peak, median over steps."""
        sizes = [source.config.get(f"train.{key}") for key in ("batch_size", "microbatch")]
        rows = [size for size in sizes if isinstance(size, int) and 0 < size <= MOST_ROWS]
        microbatches = rows[0] / rows[1] if len(rows) == 2 else 1.0
        work = multiplied(source.stretches, source.done)
        self.multiplied = microbatches * sum(work.values())
        """Multiply-adds of linear layers, of which `shares` by elements, the largest first."""
        self.shares = {
            elements: microbatches * work[elements] / self.multiplied
            for elements in sorted(work, key=work.__getitem__, reverse=True)
            if work[elements]
        }


class WeakGradient(NamedTuple):
    """Measured steps at which the gradient was lost in its quantisation noise ("FP4 All the Way",
    arXiv 2505.19115): its norm was below √3 times that of the noise.

    Args:
        step: the first of them.
        ratio: norm of the gradient over that of the noise there.
        below: their number, of `measured` steps; 0: there were none.
    """

    step: int
    ratio: float
    below: int
    measured: int


def weak_gradient(source: RunSource) -> WeakGradient:
    """The measured steps at which the gradient of a run was too weak."""
    ratio = source.metrics.series("error/gradient_to_noise")
    below = (ratio.values < THRESHOLD).nonzero()[0]
    if not len(below):
        return WeakGradient(0, math.nan, 0, len(ratio))
    index = below[0]
    return WeakGradient(int(ratio.steps[index]), float(ratio.values[index]), len(below), len(ratio))


def other_tokens(sources: Sequence[RunSource]) -> bool:
    """Whether the fingerprints of the runs' training data differ."""
    prints = {
        str(source.environments[-1][1].get("data")) for source in sources if source.environments
    }
    return len(prints) > 1


def differences(sources: Sequence[RunSource]) -> dict[str, ByRuns]:
    """The keys of the known configurations whose values differ."""
    configured = [source for source in sources if source.config]
    differing = differing_values([source.config for source in configured])
    return {
        key: _by_runs(dict(zip(configured, values, strict=True)))
        for key, values in differing.items()
        if not key.endswith(_CACHE)
    }


def environments(sources: Sequence[RunSource]) -> dict[str, ByRuns]:
    """Host, device and versions of every run at its last start, by key; empty where none was
    recorded.
    """
    latest = {
        source: flattened(source.environments[-1][1]) for source in sources if source.environments
    }
    keys = dict.fromkeys(key for environment in latest.values() for key in environment)
    return {
        key: _by_runs({source: latest[source].get(key, "–") for source in latest}) for key in keys
    }


def _by_runs(values: Mapping[RunSource, Any]) -> ByRuns:
    runs: dict[str, list[int]] = {}
    for source, value in values.items():
        runs.setdefault(as_written(value), []).append(source.number)
    alone = len(runs) == 1
    return [(value, "" if alone else ranges(numbers, least=3)) for value, numbers in runs.items()]
