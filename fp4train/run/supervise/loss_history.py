"""The history of a run's losses: whether one lies far above its own past.

The past of a loss is the last `WINDOW` = 32 losses that were within their own past. With its median
m, its spread s = 1.4826 · median |loss − m|, its ceiling c (the second largest loss, so that a
single outlier is not the measure) and the number n of its losses,

    limit = max(c, m + max(6 s, (0.2 + 1.6 / n) |m|))

A loss above the limit begins a rise, which lasts while losses are above c. After `PERSIST` = 5
losses it is a divergence, which ends when 5 losses in a row are within c again. A rise that ends
earlier is noise of a batch, and joins the past. A loss that falls, as in the warm-up, never reaches
its limit; few losses have a wide one, because their spread says little.

A run that ends with its last 5 losses (their median) above its first one by more than max(3 s,
(0.02 + 2 / steps)
|first|) ended above where it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from fp4train.config.schema import MOST_STEPS

WINDOW = 32
PERSIST = 5


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """The return of a run to a milestone.

    Args:
        step: step of the milestone.
        rewinds: rewinds of the whole run, this one included; skips: new skips of `Divergence`.
        record: for history and metrics: the step (from 1) whose loss began to rise, and the first
            and the last of the batches that are skipped now, by their place in the data (from 0).
    """

    step: int
    rewinds: int
    skips: tuple[tuple[int, int], ...]
    record: dict[str, Any]


@dataclass(kw_only=True)
class Divergence:
    """The history of a run's losses.

    Args:
        known: steps whose losses were read.
        first: the first loss of the run; None: none was read, or the run began before it was kept.
        past: the last losses that were within their past.
        recent: the last `PERSIST` losses.
        since: the step (from 0) whose loss began the current rise; None: the last loss is within
            its past.
        high: losses of the rise; calm: those within the ceiling since the last one above it.
        rewinds: how often the run went back to a milestone.
        skips: (step, batches): from that step on, up to the next entry, so many batches of the data
            were skipped.
    """

    known: int = 0
    first: float | None = None
    past: tuple[float, ...] = ()
    recent: tuple[float, ...] = ()
    since: int | None = None
    high: int = 0
    calm: int = 0
    rewinds: int = 0
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        numbers = [number for pair in self.skips for number in pair]
        if (self.since is None) != (self.high == 0) or (self.high and not self.past):
            raise ValueError(
                "a rise of the loss, its steps and the past before it do not go together"
            )
        if not all(0 <= number <= MOST_STEPS for number in numbers):
            raise ValueError(f"skips={self.skips} must be steps and numbers of batches")

    @property
    def seen(self) -> bool:
        """Whether the loss has diverged, and is not back."""
        return self.high >= PERSIST

    @property
    def level(self) -> float:
        return median(self.past)

    @property
    def spread(self) -> float:
        level = self.level
        return 1.4826 * median([abs(loss - level) for loss in self.past])

    @property
    def ceiling(self) -> float:
        return sorted(self.past)[-2:][0]

    @property
    def limit(self) -> float:
        level = self.level
        return max(
            self.ceiling, level + max(6 * self.spread, (0.2 + 1.6 / len(self.past)) * abs(level))
        )

    def add(self, step: int, loss: float) -> None:
        """The loss of step `step` (from 0) is known."""
        self.known = step + 1
        self.first = loss if step == 0 else self.first
        self.recent = (*self.recent, loss)[-PERSIST:]
        if not self.past or (self.since is None and (loss <= self.ceiling or loss <= self.limit)):
            self.past = (*self.past, loss)[-WINDOW:]
        elif self.since is None:
            self.since = step
            self.high = 1
            self.calm = 0
        elif loss > self.ceiling:
            self.high = min(self.high + 1, PERSIST)
            self.calm = 0
        elif not self.seen:
            self.past = (*self.past, *self.recent[-self.high - 1 :])[-WINDOW:]
            self.since = None
            self.high = 0
        else:
            self.calm += 1
            if self.calm == PERSIST:
                self.past = (*self.past, *self.recent)[-WINDOW:]
                self.since = None
                self.high = 0
                self.calm = 0

    def ends_above_its_beginning(self, steps: int) -> bool:
        """Whether a run of `steps` steps does that."""
        if self.first is None or steps < 2:
            return False
        margin = max(3 * self.spread, (0.02 + 2 / steps) * abs(self.first))
        return median(self.recent) > self.first + margin

    def skipped(self, step: int) -> int:
        """Batches of the data that were skipped before the one of step `step`."""
        return next((batches for begin, batches in reversed(self.skips) if begin <= step), 0)

    def rewind(self, step: int, done: int) -> Rewind:
        """Back to the milestone of step `step`, and past the batches of all steps up to `done`."""
        begin = step + self.skipped(step)
        last = done + self.skipped(done) - 1
        skips = (*(skip for skip in self.skips if skip[0] < step), (step, last + 1 - step))
        record = {
            "diverged": done if self.since is None else self.since + 1,
            "skipped": [begin, last],
        }
        return Rewind(step=step, rewinds=self.rewinds + 1, skips=skips, record=record)
