"""The values of one key of the metrics over steps, and their trailing mean.

Smoothing is the trailing mean over 2 % of the logged losses of a run, and over at least 10. At the
start, where the loss falls fast, the window is a tenth of the points so far. Runs of equal length
have equal windows; gaps between runs of other lengths are of means over the window of the shortest.
The "training loss" of a run is the last value of that mean, wherever it is named.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_WINDOW = 10
WINDOW_SHARE = 0.02
_DIGITS = 12
"""Binary digits by which values differ at most that are summed together."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one key by ascending step; if a step was logged twice, the later line counts.

    Args:
        bounds: the lower and the upper end of an interval at each step, NaN where there is none;
            None: no step has one.
    """

    steps: Floats
    values: Floats
    bounds: tuple[Floats, Floats] | None = None

    @classmethod
    def by_step(cls, values: Mapping[int, float]) -> "Series":
        """The series of values by step, in any order."""
        steps = sorted(values)
        return cls(
            steps=np.array(steps, dtype=np.float64),
            values=np.array([values[step] for step in steps], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def window(self) -> int:
        """Number of points that `smoothed` averages."""
        return max(1, min(len(self), max(MIN_WINDOW, round(WINDOW_SHARE * len(self)))))

    @property
    def last_window(self) -> int:
        """Number of points that the last value of `smoothed` averages."""
        return min(max(len(self) - 1, 0) // 10 + 1, self.window)

    def smoothed(self, window: int | None = None) -> "Series":
        """Trailing mean; NaN if its window has a value that is not finite.

        Args:
            window: points that a value averages at most; None: the window of this series.
        """
        index = np.arange(len(self))
        most = self.window if window is None else window
        start = index + 1 - np.minimum(index // 10 + 1, most)
        finite = np.isfinite(self.values)
        values = np.where(finite, self.values, 0.0)
        bad = np.concatenate([[0], np.cumsum(~finite)])
        # sums of values of one size: a loss of 1e34 would cancel all that come after it
        sizes = np.frexp(values)[1] // _DIGITS
        total = np.zeros(len(self))
        for size in np.unique(sizes):
            sums = np.concatenate([[0.0], np.cumsum(np.where(sizes == size, values, 0.0))])
            total += sums[index + 1] - sums[start]
        mean = total / (index + 1 - start)
        return Series(steps=self.steps, values=np.where(bad[index + 1] == bad[start], mean, np.nan))

    def at(self, steps: Floats) -> Floats:
        """Values at steps that are all in the series."""
        return self.values[np.searchsorted(self.steps, steps)]


class TrainingLoss(NamedTuple):
    """The training loss of a run: the last smoothed value, and how many steps it is the mean of."""

    loss: float
    steps: int

    @classmethod
    def of(cls, losses: Series) -> "TrainingLoss":
        """The training loss of a run with these losses, at least one."""
        return cls(float(losses.smoothed().values[-1]), losses.last_window)
