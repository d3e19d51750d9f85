"""Records of a run's numbers: RUN/metrics.jsonl always, Weights & Biases or TensorBoard beside
it.
"""

from fp4train.track.config import (
    JsonlTracking,
    NoTracking,
    TensorBoardTracking,
    Tracking,
    WandbTracking,
    start_tracker,
)
from fp4train.track.metrics import (
    MetricsLog,
    mend,
    read_metrics,
)
from fp4train.track.statistics import (
    GRADIENT,
    OPERAND,
    STATISTICS,
    Statistics,
    StatisticsLog,
    read_statistics,
)
from fp4train.track.tracker import (
    NullTracker,
    QueuedTracker,
    Tracker,
    Trackers,
)
from fp4train.track.wandb import WandbTracker
