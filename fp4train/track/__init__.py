"""Where the numbers of a run go: RUN/metrics.jsonl always, Weights & Biases beside it."""

from fp4train.track.config import JsonlTracking, NoTracking, WandbTracking
from fp4train.track.metrics import MetricsLog, read_metrics
from fp4train.track.tracker import NullTracker, Tracker, Trackers
from fp4train.track.wandb import WandbTracker

__all__ = [
    "JsonlTracking",
    "MetricsLog",
    "NoTracking",
    "NullTracker",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "WandbTracking",
    "read_metrics",
]
