"""Where the numbers of a run go: RUN/metrics.jsonl always, Weights & Biases beside it."""

from fp4train.track.config import JsonlTracking, NoTracking, WandbTracking
from fp4train.track.metrics import MetricsLog, mend, read_metrics
from fp4train.track.queued import Queued
from fp4train.track.tracker import NullTracker, Tracker, Trackers
from fp4train.track.wandb import WandbTracker

__all__ = [
    "JsonlTracking",
    "MetricsLog",
    "NoTracking",
    "NullTracker",
    "Queued",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "WandbTracking",
    "mend",
    "read_metrics",
]
