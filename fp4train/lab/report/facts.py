"""Facts about the runs of a report: what differs in their data, configuration and environment; weak
gradients; cost.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp4train.config.binding import flattened
from fp4train.lab.analysis.compare import differing_values
from fp4train.lab.report.sources import RunSource
from fp4train.run.observe import THRESHOLD
from fp4train.run.record.stretches import multiplied
from fp4train.text import as_written, ranges

MOST_ROWS = 1 << 40
"""A batch of more sequences is none."""
_CACHE = ".cache_dir"
"""The end of keys that say where a source keeps its tokens."""

ByRuns = list[tuple[str, str]]
"""Distinct values, each with the numbers of its runs; without numbers where all runs have it."""


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
