"""Where the numbers of a run go: RUN/metrics.jsonl always, Weights & Biases or TensorBoard beside it."""

from fp4train.track.config import JsonlTracking, NoTracking, TensorBoardTracking, WandbTracking
from fp4train.track.metrics import MetricsLog, mend, read_metrics
from fp4train.track.statistics import STATISTICS, Statistics, read_statistics
from fp4train.track.tracker import NullTracker, QueuedTracker, Tracker, Trackers
from fp4train.track.wandb import WandbTracker

__all__ = [
    "STATISTICS",
    "JsonlTracking",
    "MetricsLog",
    "NoTracking",
    "NullTracker",
    "QueuedTracker",
    "Statistics",
    "TensorBoardTracking",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "WandbTracking",
    "mend",
    "read_metrics",
    "read_statistics",
]
