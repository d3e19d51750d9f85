"""The Hydra group `track`: each entry builds the tracker of a run.

Every entry but `NoTracking` writes RUN/metrics.jsonl; that file is what resume, curves and compare
read.
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
        """The tracker of a run; of a plugin what is called beside RUN/metrics.jsonl.

        Args:
            run_dir: the folder of the run's files.
            run_name: the run's name, as services show it.
            config: the whole configuration, as plain values.
            resume_step: steps done at the checkpoint that the run goes on from; None: it starts at
                step 0.
        """


@dataclass(frozen=True, kw_only=True)
class JsonlTracking:
    """RUN/metrics.jsonl only."""

    def build(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
    ) -> Tracker:
        """Lines after `resume_step` are dropped.

        A service beside the metrics may fail to start: not installed, a broken setting, no answer.
        """
        metrics = MetricsLog(run_dir / METRICS, resume_step=resume_step)
        try:
            service = self._service(run_dir, run_name, config, resume_step)
        except Exception as error:
            _log.warning(
                "%s is switched off: %s",
                type(getattr(self, "tracking", self)).__name__.removesuffix("Tracking").lower(),
                error,
            )
            return metrics
        if service is None:
            return metrics
        return Trackers(metrics, service)

    def _service(
        self, run_dir: Path, run_name: str, config: Mapping[str, Any], step: int | None
    ) -> Tracker | None:
        """The tracker beside the metrics log; None: there is none."""
        return None


@dataclass(frozen=True, kw_only=True)
class WandbTracking(JsonlTracking):
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
        object.__setattr__(self, "tags", tuple(self.tags))  # a list in YAML
        check_choice("track.mode", self.mode, ("auto", "offline"))
        if not self.timeout > 0:
            raise ValueError(f"track.timeout={self.timeout}: must be more than 0 seconds")

    def _service(
        self, run_dir: Path, run_name: str, config: Mapping[str, Any], step: int | None
    ) -> Tracker:
        settings: dict[str, Any] = {
            "charts": Charts(project=self.project, entity=self.entity),
            "group": self.group,
            "tags": self.tags or None,
            "offline": self.mode == "offline",
            "timeout": self.timeout,
            "resumed": step is not None,
        }
        return QueuedTracker(
            lambda: WandbTracker(run_dir, run_name, config, **settings),
            WandbTracker.__name__,
            start_seconds=STARTS * self.timeout + IMPORT_SECONDS,
            finish_seconds=2 * self.timeout + PROBE_SECONDS,
            abandon=end_service,
        )


@dataclass(frozen=True, kw_only=True)
class TensorBoardTracking(JsonlTracking):
    """RUN/metrics.jsonl, and an event file of TensorBoard in RUN/tensorboard beside it."""

    def _service(
        self, run_dir: Path, run_name: str, config: Mapping[str, Any], step: int | None
    ) -> Tracker:
        return QueuedTracker(
            lambda: TensorBoardTracker(run_dir, config, resume_step=step),
            TensorBoardTracker.__name__,
            start_seconds=IMPORT_SECONDS,
            finish_seconds=FLUSH_SECONDS,
        )


@dataclass(frozen=True, kw_only=True)
class NoTracking:
    """Nothing at all, for benchmarks: such a run has no curves and cannot be compared."""

    def build(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
    ) -> Tracker:
        return NullTracker()


@dataclass(frozen=True)
class _PluginTracking(JsonlTracking):
    """RUN/metrics.jsonl, and the tracker of a plugin beside it, which can neither hold nor end the
    run.
    """

    tracking: Tracking

    def _service(
        self, run_dir: Path, run_name: str, config: Mapping[str, Any], step: int | None
    ) -> Tracker:
        return QueuedTracker(
            lambda: self.tracking.build(run_dir, run_name, config, resume_step=step),
            type(self.tracking).__name__,
            start_seconds=IMPORT_SECONDS,
            finish_seconds=FLUSH_SECONDS,
        )


def start_tracker(
    tracking: Tracking,
    run_dir: Path,
    run_name: str,
    config: Mapping[str, Any],
    *,
    resume_step: int | None,
) -> Tracker:
    """The tracker of a run, whoever wrote the class that `track` names. See `Tracking.build`."""
    if not isinstance(tracking, JsonlTracking | NoTracking):
        tracking = _PluginTracking(tracking)
    return tracking.build(run_dir, run_name, config, resume_step=resume_step)
