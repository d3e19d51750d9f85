"""Facts about the runs of a report: what differs in their data, configuration and environment; weak
gradients; cost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from fp4train.config import to_config
from fp4train.data.source import planned_vocab_size
from fp4train.errors import UserError
from fp4train.hardware import Device, Gpu
from fp4train.lab.analysis.figure import plain
from fp4train.lab.costs import CostEstimate, estimate
from fp4train.lab.report.sources import UNREADABLE, RunSource
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model, build_plan
from fp4train.run.observe import THRESHOLD
from fp4train.run.record import directory as run_directory
from fp4train.run.record.journal import UNRECORDED
from fp4train.run.record.stretches import multiplied
from fp4train.run.record.trust import check_paths
from fp4train.run.timeline import build_timeline
from fp4train.text import as_written, first_line, ranges

LARGEST = 1 << 20
"""A model with a larger number in its configuration is none."""
KEYS = 150
"""Differing keys that are listed."""
MOST_ROWS = 1 << 40
"""A batch of more sequences is none."""
_UNINTERESTING = ("run.name", "run.dir")
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
    for key, value in (source.config or {}).items():
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


@dataclass(frozen=True)
class Differing:
    """The keys in which configurations differ: values by runs of the first `KEYS`, their number,
    that of all keys.
    """

    rows: list[tuple[str, ByRuns]]
    count: int
    keys: int


class RunCost:
    """Tokens, time and arithmetic of a run; NaN or None where it is not known."""

    def __init__(self, source: RunSource) -> None:
        tokens, speed, mfu = map(
            source.metrics.series, ("train/tokens", "perf/tokens_per_s", "perf/mfu")
        )
        self.tokens = float(tokens.values[-1]) if len(tokens) else math.nan
        self.seconds = math.nan
        """Tokens, and seconds of all steps."""
        if len(speed) > 1 and len(tokens) and (speed.values > 0).all():
            self.seconds = self.tokens / len(speed) * float(np.sum(1 / speed.values))
        self.speed = source.summary.tokens_per_s
        """Tokens per second, median over steps."""
        self.mfu = float(np.median(mfu.values)) if len(mfu) else None
        """Share of the GPU's peak, median over steps."""
        work = _arithmetic(source)
        self.multiplied = sum(work.values())
        """Multiply-adds of linear layers, of which `shares` by elements."""
        self.shares = {
            elements: work[elements] / self.multiplied
            for elements in sorted(work, key=work.__getitem__, reverse=True)
        }


@dataclass(frozen=True, kw_only=True)
class DataDifference:
    """Why losses of runs may not compare.

    Args:
        other_tokens: fingerprints of the training data differ.
        data: differing keys of the data.
        evaluation: differing keys that choose the tokens of validation.
    """

    other_tokens: bool
    data: list[str]
    evaluation: list[str]


def different_data(sources: Sequence[RunSource]) -> DataDifference:
    """What is known of other data, tokens, or sequences."""
    prints = {
        str(source.environments[-1][1].get("data")) for source in sources if source.environments
    }
    configured = [source for source in sources if source.config is not None]
    keys = dict.fromkeys(key for source in configured for key in source.config or {})
    data = [key for key in keys if key.startswith("data.") and not key.endswith(_CACHE)]

    def differing(keys: Sequence[str]) -> list[str]:
        return [key for key in keys if len({str(s.setting(key)) for s in configured}) > 1]

    return DataDifference(
        other_tokens=len(prints) > 1,
        data=differing(data),
        evaluation=differing(("train.seq_len", "eval.batches")),
    )


@dataclass(frozen=True, kw_only=True)
class WeakGradient:
    """Measured steps at which the gradient was lost in its quantisation noise ("FP4 All the Way",
    arXiv 2505.19115): its norm was below √3 times that of the noise.

    Args:
        step: the first of them. ratio: norm of the gradient over that of the noise there.
        below: their number, of `measured` steps.
    """

    step: int
    ratio: float
    below: int
    measured: int


def weak_gradient(source: RunSource) -> WeakGradient | None:
    """The measured steps at which the gradient was too weak; None: there were none."""
    ratio = source.metrics.series("error/gradient_to_noise")
    below = (ratio.values < THRESHOLD).nonzero()[0]
    if not len(below):
        return None
    index = int(below[0])
    return WeakGradient(
        step=int(ratio.steps[index]),
        ratio=float(ratio.values[index]),
        below=len(below),
        measured=len(ratio),
    )


def differences(sources: Sequence[RunSource]) -> Differing | None:
    """The configuration keys whose values differ; None where fewer than two configurations are
    known.
    """
    configured = [source for source in sources if source.config is not None]
    if len(configured) < 2:
        return None
    keys = list(dict.fromkeys(key for source in configured for key in source.config or {}))
    skipped = (*UNRECORDED, *_UNINTERESTING)
    differing = [
        key
        for key in keys
        if key not in skipped
        and not key.endswith(_CACHE)
        and len({_show(s.setting(key)) for s in configured}) > 1
    ]
    rows = [
        (
            key,
            _by_runs(
                {s: _show(s.setting(key)) for s in configured if key in (s.config or {})},
                len(configured),
            ),
        )
        for key in differing[:KEYS]
    ]
    return Differing(rows, len(differing), len(keys))


def environments(sources: Sequence[RunSource]) -> list[tuple[str, ByRuns]]:
    """Host, device and versions of every run at its last start, by key; empty where none was
    recorded.
    """
    latest = {
        source: _flat(source.environments[-1][1]) for source in sources if source.environments
    }
    keys = dict.fromkeys(key for environment in latest.values() for key in environment)
    return [
        (
            key,
            _by_runs(
                {s: environment.get(key, "–") for s, environment in latest.items()}, len(latest)
            ),
        )
        for key in keys
    ]


def _arithmetic(source: RunSource) -> dict[str, float]:
    """Multiply-adds of the linear layers by elements, for the steps that were trained."""
    batch = source.setting("train.batch_size")
    microbatch = source.setting("train.microbatch")
    sizes = [
        size for size in (batch, microbatch) if isinstance(size, int) and 0 < size <= MOST_ROWS
    ]
    count = sizes[0] / sizes[1] if len(sizes) == 2 else 1.0
    work = multiplied(source.stretches, source.done)
    return {elements: macs * count for elements, macs in work.items() if macs}


def _by_runs(values: Mapping[RunSource, str], everything: int) -> ByRuns:
    runs: dict[str, list[int]] = {}
    for source, value in values.items():
        runs.setdefault(value, []).append(source.number)
    alone = len(runs) == 1 and len(values) == everything
    return [(value, "" if alone else ranges(numbers, least=3)) for value, numbers in runs.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in list(values.items())[:100]:
        if isinstance(value, dict) and not prefix:
            if key == "versions":
                section = "version of"
            else:
                section = plain(key, 60)
            flat |= _flat(value, f"{section} ")
        else:
            flat[plain(f"{prefix}{key}", 80)] = _show(value)
    return flat


def _show(value: Any) -> str:
    return plain(as_written(value), 200)


def duration(seconds: float) -> str:
    """ "90 s", "20 min", "3.1 h"; a dash where it is not known."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 7200:
        if seconds < 120:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
