"""Where the numbers of a run go: RUN/metrics.jsonl always, Weights & Biases or TensorBoard beside it."""

from fp4train.track.config import JsonlTracking, NoTracking, TensorBoardTracking, WandbTracking
from fp4train.track.metrics import MetricsLog, mend, read_metrics
from fp4train.track.statistics import STATISTICS, Columns, Statistics, read_statistics
from fp4train.track.tracker import NullTracker, Queued, Tracker, Trackers
from fp4train.track.wandb import WandbTracker

__all__ = [
    "STATISTICS",
    "Columns",
    "JsonlTracking",
    "MetricsLog",
    "NoTracking",
    "NullTracker",
    "Queued",
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
