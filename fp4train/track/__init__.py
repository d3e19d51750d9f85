"""Records of a run's numbers: RUN/metrics.jsonl always, Weights & Biases or TensorBoard beside
it.
"""

from fp4train.track.config import JsonlTracking as JsonlTracking
from fp4train.track.config import NoTracking as NoTracking
from fp4train.track.config import TensorBoardTracking as TensorBoardTracking
from fp4train.track.config import Tracking as Tracking
from fp4train.track.config import WandbTracking as WandbTracking
from fp4train.track.metrics import MetricsLog as MetricsLog
from fp4train.track.metrics import mend as mend
from fp4train.track.metrics import read_metrics as read_metrics
from fp4train.track.statistics import GRADIENT as GRADIENT
from fp4train.track.statistics import OPERAND as OPERAND
from fp4train.track.statistics import STATISTICS as STATISTICS
from fp4train.track.statistics import Statistics as Statistics
from fp4train.track.statistics import StatisticsLog as StatisticsLog
from fp4train.track.statistics import read_statistics as read_statistics
from fp4train.track.tracker import NullTracker as NullTracker
from fp4train.track.tracker import QueuedTracker as QueuedTracker
from fp4train.track.tracker import Tracker as Tracker
from fp4train.track.tracker import Trackers as Trackers
from fp4train.track.wandb import WandbTracker as WandbTracker
