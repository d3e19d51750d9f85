"""Records of a run's numbers: RUN/metrics.jsonl always, Weights & Biases or TensorBoard beside
it.
"""

from fp4train.track.config import (
    JsonlTracking as JsonlTracking,
    NoTracking as NoTracking,
    TensorBoardTracking as TensorBoardTracking,
    Tracking as Tracking,
    WandbTracking as WandbTracking,
    start_tracker as start_tracker,
)
from fp4train.track.metrics import (
    MetricsLog as MetricsLog,
    mend as mend,
    read_metrics as read_metrics,
)
from fp4train.track.statistics import (
    GRADIENT as GRADIENT,
    OPERAND as OPERAND,
    STATISTICS as STATISTICS,
    Statistics as Statistics,
    StatisticsLog as StatisticsLog,
    read_statistics as read_statistics,
)
from fp4train.track.tracker import (
    NullTracker as NullTracker,
    QueuedTracker as QueuedTracker,
    Tracker as Tracker,
    Trackers as Trackers,
)
from fp4train.track.wandb import WandbTracker as WandbTracker
