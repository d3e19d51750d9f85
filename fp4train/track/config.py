"""The Hydra group `track`: each entry builds the tracker that stands beside RUN/metrics.jsonl.

Every run but one with `NoTracking` writes that file, which resume, curves and compare read.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fp4train.paths import DestinationText
from fp4train.text import check_choice
from fp4train.track.metrics import MetricsLog
from fp4train.track.tensorboard import TensorBoardTracker
from fp4train.track.tracker import NullTracker, QueuedTracker, Tracker, Trackers
from fp4train.track.wandb import PROBE_SECONDS, Charts, WandbTracker, end_service

_log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
STARTS = 3
"""wandb may try to go online, give up, and start again offline."""
IMPORT_SECONDS = 30.0
"""Importing wandb and starting its service, on a machine in use."""

FLUSH_SECONDS = 10.0


class Tracking(Protocol):
    """The protocol of `track=…`."""

    def build(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
    ) -> Tracker:
        """The tracker that is called beside RUN/metrics.jsonl; it can neither hold nor end the run.

        Args:
            run_dir: the folder of the run's files.
            run_name: the run's name, as services show it.
            config: the whole configuration, as plain values.
            resume_step: steps done at the checkpoint that the run goes on from; None: it starts at
                step 0.
        """
        return NullTracker()


@dataclass(frozen=True, kw_only=True)
class JsonlTracking(Tracking):
    """RUN/metrics.jsonl only."""


@dataclass(frozen=True, kw_only=True)
class WandbTracking(Tracking):
    """RUN/metrics.jsonl, and Weights & Biases beside it.

    Args:
        project, entity, group, tags: arguments of `wandb.init`; where there is none, wandb's
            variable says it (WANDB_PROJECT, …).
        mode: "auto" (online where logged in and reachable) or "offline".
        timeout: seconds to wait for the server at the start, and again at the end.
    """

    project: DestinationText | None = None
    entity: DestinationText | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: str = "auto"
    timeout: float = 5.0

    def __post_init__(self) -> None:
        check_choice("track.mode", self.mode, ("auto", "offline"))
        if not self.timeout > 0:
            raise ValueError(f"track.timeout={self.timeout}: must be more than 0 seconds")

    def build(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
    ) -> Tracker:
        return WandbTracker(
            run_dir,
            run_name,
            config,
            charts=Charts(project=self.project, entity=self.entity),
            group=self.group,
            tags=self.tags or None,
            offline=self.mode == "offline",
            timeout=self.timeout,
            resumed=resume_step is not None,
        )


@dataclass(frozen=True, kw_only=True)
class TensorBoardTracking(Tracking):
    """RUN/metrics.jsonl, and an event file of TensorBoard in RUN/tensorboard beside it."""

    def build(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
    ) -> Tracker:
        return TensorBoardTracker(run_dir, config, resume_step=resume_step)


@dataclass(frozen=True, kw_only=True)
class NoTracking(Tracking):
    """Nothing at all, for benchmarks: such a run has no curves and cannot be compared."""


def start_tracker(
    tracking: Tracking,
    run_dir: Path,
    run_name: str,
    config: Mapping[str, Any],
    *,
    resume_step: int | None = None,
) -> Tracker:
    """The tracker of a run: the log of its metrics, whose lines after `resume_step` are dropped,
    and what `track` names beside it, whoever wrote that. See `Tracking.build`.

    A service may fail to start: not installed, a broken setting, no answer.
    """
    if isinstance(tracking, NoTracking):
        return NullTracker()
    metrics = MetricsLog(run_dir / METRICS, resume_step=resume_step)
    if isinstance(tracking, JsonlTracking):
        return metrics
    name = type(tracking).__name__.removesuffix("Tracking")
    start_seconds = IMPORT_SECONDS
    finish_seconds = FLUSH_SECONDS
    if isinstance(tracking, WandbTracking):
        start_seconds += STARTS * tracking.timeout
        finish_seconds = 2 * tracking.timeout + PROBE_SECONDS
    try:
        service = QueuedTracker(
            lambda: tracking.build(run_dir, run_name, config, resume_step=resume_step),
            name,
            start_seconds=start_seconds,
            finish_seconds=finish_seconds,
            abandon=end_service,
        )
    except Exception as error:
        _log.warning("%s is switched off: %s", name.lower(), error)
        return metrics
    return Trackers(metrics, service)
