"""The history of a run's losses: whether one lies far above its own past.

The past of a loss is the last `MEMORY` = 64 losses that were within their own past. Of the last
`WINDOW` = 32 of them are the median m and the spread s = 1.4826 · median |loss − m|; the ceiling c
is the second largest of all 64, so that a single outlier is not the measure. With the number n of
the losses in the window,

    limit = max(c, m + max(6 s, (0.2 + 1.6 / n) |m|, 0.1))

A loss above the limit begins a rise, which lasts while losses are above it; while the window is not
full, while they are above max(c, m + 0.1). A rise that ends within `PERSIST` = 5 losses is noise of
a batch, and joins the past, its losses at most 4 · limit − 3 m, as they would hide later ones. One
that does not is a divergence. Few losses have a wide limit, because their spread says little.

That measure is wide on a falling curve. So losses are also measured from the trend, the median f of
the last `RECENT` = 8 of them. The residual of a past loss is what it lies above the median of the 8
before it; J is the largest residual, S the spread of all. A loss above

    f + max(1.5 J, 6 S, (0.3 + 1.6 / n) |f|, 0.1)

begins a rise, too, once the past has 8 losses. It lasts while losses are above this bar, and so does
one that the limit began above it, if the bar is lower. Where the last 8 are below 0.8 ln V (see
below), 6 S is at most seven tenths of the way from f to ln V: S is wide while losses fall, and would
hide weights that are drawn anew and learn again at once.

A loss fits the curve before it if it is within its past and at most f + max(J, 3 R, 0.1 |f|), with
the spread R of the last 16 residuals. Five losses in a row that fit the curve from before a
divergence, or are within 0.1 of f, end it.

A slow rise takes both measures with it. So the mean of the last `WINDOW` losses is judged, too,
without the highest and the lowest quarter, which may be outliers. Where it was lowest, at L with
the spread s, its margin is d = max(0.4 |L|, 5 s, 0.1). A mean above L + d is a divergence at once,
which began with the first of the last losses that all are above L + 0.75 d.

A model that knows nothing gives all V tokens of the vocabulary the same probability: its loss is
ln V. Once the first of the losses, or `PERSIST` in a row, were below 0.8 ln V, or L lies 5 s below
0.95 ln V, `LASTING` = 12 in a row above 0.95 ln V are a divergence; where the run ends, `PERSIST`.
So are as many above 1.2 times the larger of ln V and the first loss, whatever came before them.
Vocabularies below `LEAST_VOCABULARY` are left out.

An evaluation at the end of a run judges its last state by earlier ones, of states that a later loss
showed to be good. Where its loss fits the curve, and is at most 1.5 times the evaluation before it
and before the rise, at e, a rise that is no divergence yet was noise of batches. It is a divergence
if it is above 1.5 e and half the way from e to ln V, or above 0.95 ln V and 1.1 e where e is within
the past (a student's also where it is not), or without ln V above 2 e + 0.1; where there is no e,
above the limit and twice the larger of ln V and the first loss, or 0.95 ln V as the last loss of a
rise after lower ones.
Above max(1.2 e, e + 0.1) it is one if the losses rose with it: if the median of the last `PERSIST`
is above m + max(1.5 s, 0.1 |m|), by those of the past that are older than `LASTING`.

The state that gave a loss is known to be good if the loss fits the curve, is at most L + 0.75 d, and
is not above 0.95 ln V after any loss below 0.8 ln V or such an L, nor above 1.2 times the larger of ln V and the
first loss.

A run that ends with its last 5 losses (their median) above its first one by more than max(3 s,
(0.02 + 2 / steps)
|first|) ended above where it began. One whose divergence is measured from fewer than `WINDOW` losses
has diverged for its exit code only if the median of the last `LASTING` lies 2 spreads of them above
it, or above ln V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import Any

from fp4train.config.schema import MOST_STEPS

HISTORY = "divergence"
"""Key of the history in the state of a run."""
MEMORY = 64
WINDOW = 32
PERSIST = 5
RECENT = 8
LASTING = 12
LEAST_VOCABULARY = 64
"""Tokens from which on a loss near ln V tells that nothing is known; of few, as of DNA's letters, it
is an ordinary one."""
LEAST_RISE = 0.1
"""Nats: a smaller rise is noise, also of a model that has learned nearly everything."""
LEARNED = 0.8
"""Share of ln V below which something is learned."""
FORGOTTEN = 0.7
"""Share of the way from the trend to ln V beyond which weights have lost most of what they knew."""
LOST = 0.95
"""Share of ln V above which nothing is known."""
WORSE = 1.2
"""Share of ln V, or of the first loss, above which a model is worse than one that knows nothing."""


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
        past: the last `MEMORY` losses that were within their past.
        recent: the last `PERSIST` losses; last: the last `LASTING`.
        since: the step (from 0) whose loss began the current rise; None: the last loss is within
            its past.
        high: losses of the rise; calm: those within the bar since the last one above it.
        from_trend: whether the rise is measured from the trend, whose bar is the lower one.
        from_best: whether the rise is measured from the lowest mean, or is one to `uniform`.
        lowest: the lowest mean of `WINDOW` losses, and the margin above it; None: there were fewer.
        least: the least loss.
        learned: whether the first loss, or `PERSIST` in a row, were below `LEARNED` of `uniform`.
        uniform: ln V, the loss of equally likely tokens; 0: losses are not compared with it.
        evaluated: the loss of the last evaluation, in the recipe, of a state that a later loss showed
            to be good, or of the end of a run; None: there was none.
        unproven: that of an evaluation of a state that no later loss has shown to be good yet.
        fits: whether the last loss fits the curve before it, and shows that its state is good.
        rewinds: how often the run went back to a milestone.
        skips: (step, batches): from that step on, up to the next entry, so many batches of the data
            were skipped.
    """

    known: int = 0
    first: float | None = None
    past: tuple[float, ...] = ()
    recent: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    since: int | None = None
    high: int = 0
    calm: int = 0
    from_trend: bool = False
    from_best: bool = False
    lowest: tuple[float, float] | None = None
    least: float = math.inf
    learned: bool = False
    uniform: float = 0.0
    evaluated: float | None = None
    unproven: float | None = None
    fits: bool = True
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

    def anew(self) -> Divergence:
        """The history where other data begin, whose losses are not measured from those before."""
        kept = {key: getattr(self, key) for key in ("known", "uniform", "rewinds", "skips")}
        return Divergence(**kept)

    @property
    def seen(self) -> bool:
        """Whether the loss has diverged, and is not back."""
        return self.high >= PERSIST

    @property
    def beyond_noise(self) -> bool:
        """Whether the loss has diverged, and not from a level of a few losses that were low by
        chance: it is then above that by more than the last losses vary, or above `uniform`.
        """
        if not self.seen or len(self.past) >= WINDOW:
            return self.seen
        last = self.last or self.recent  # of a run written before `last` was kept
        loss = median(last)
        level = self.measured_from[0]
        if loss > min(self.worthless, level + 2 * _spread(last)):
            return True
        return loss > max(level, self.uniform) > level

    @property
    def is_good(self) -> bool:
        """Whether the state that gave the last loss is good, as far as losses can tell: one that is
        low by chance among losses near `uniform` does not tell it.
        """
        lost = self._has_told and median(self.recent) > LOST * self.uniform
        return self.fits and self.since is None and not lost

    @property
    def window(self) -> tuple[float, ...]:
        return self.past[-WINDOW:]

    @property
    def level(self) -> float:
        return median(self.window)

    @property
    def spread(self) -> float:
        return _spread(self.window)

    @property
    def ceiling(self) -> float:
        return sorted(self.past)[-2:][0]

    @property
    def limit(self) -> float:
        level = self.level
        least = (0.2 + 1.6 / len(self.window)) * abs(level)
        return max(self.ceiling, level + max(6 * self.spread, least, LEAST_RISE))

    @property
    def trend(self) -> float:
        return median(self.past[-RECENT:])

    @property
    def residuals(self) -> list[float]:
        """What past losses lie above the trend before them."""
        past = self.past
        return [past[i] - median(past[max(0, i - RECENT) : i]) for i in range(1, len(past))]

    @property
    def trend_limit(self) -> float:
        residuals = self.residuals
        least = (0.3 + 1.6 / len(self.window)) * abs(self.trend)
        spread = 6 * _spread(residuals)
        if max(self.past[-RECENT:]) < LEARNED * self.uniform:
            spread = min(spread, FORGOTTEN * (self.uniform - self.trend))
        return self.trend + max(1.5 * max(residuals), spread, least, LEAST_RISE)

    @property
    def curve(self) -> float:
        """The highest loss that fits the curve."""
        margins = [0.1 * abs(self.trend)]
        if len(self.past) > 1:
            residuals = self.residuals
            margins += [max(residuals), 3 * _spread(residuals[-2 * RECENT :])]
        return self.trend + max(margins)

    @property
    def suspect(self) -> float:
        """The loss above which no state is known to be good, whatever came before it."""
        bounds = [math.inf]
        if self.lowest is not None:
            bounds.append(self.lowest[0] + 0.75 * self.lowest[1])
        if self._has_told:
            bounds.append(LOST * self.uniform)
        return min(*bounds, self.worthless)

    @property
    def _is_low(self) -> bool:
        """Whether a mean of `WINDOW` losses was far below those near `uniform`."""
        if self.lowest is None:
            return False
        return self.lowest[0] + 5 * self.spread < LOST * self.uniform

    @property
    def _has_told(self) -> bool:
        """Whether a loss told that something is learned."""
        return self._is_low or self.least < LEARNED * self.uniform

    @property
    def worthless(self) -> float:
        """The loss above which a model is worse than one that knows nothing."""
        return WORSE * max(self.uniform, self.first or 0.0) if self.uniform else math.inf

    @property
    def bar(self) -> float:
        """The level that the losses of a rise lie above."""
        if self.from_best:
            return self.suspect
        full = len(self.past) >= WINDOW
        if self.from_trend:
            within = self.trend_limit
        else:
            within = self.limit if full else max(self.ceiling, self.level + LEAST_RISE)
        return min(within, max(self.curve, self.trend + LEAST_RISE)) if self.seen else within

    @property
    def measured_from(self) -> tuple[float, float]:
        """The level that the current rise is told from, and its limit."""
        if self.from_best:
            return self.least if self.lowest is None else self.lowest[0], self.suspect
        if self.from_trend:
            return self.trend, self.trend_limit
        return self.level, self.limit

    def _within(self, loss: float) -> bool:
        """Whether a loss is within the past of the window."""
        return not self.past or loss <= self.ceiling or loss <= self.limit

    def _leaves_trend(self, loss: float) -> bool:
        if len(self.past) < RECENT or loss <= self.trend + 0.3 * abs(self.trend):
            return False
        return loss > self.trend_limit

    def _fits(self, loss: float) -> bool:
        """Whether a loss that is within its past shows that its state is good."""
        if loss > self.suspect:
            return False
        if len(self.past) < RECENT or loss <= self.trend + 0.1 * abs(self.trend):
            return True
        return loss <= self.curve

    def would_fit(self, loss: float) -> bool:
        """Whether a loss that came now would fit the curve before it."""
        return self._within(loss) and not self._leaves_trend(loss) and self._fits(loss)

    def add(self, step: int, loss: float) -> None:
        """The loss of step `step` (from 0) is known."""
        within = self._within(loss)
        leaves_trend = self._leaves_trend(loss)
        on_curve = self.since is None and within and not leaves_trend
        self.fits = on_curve and self._fits(loss)
        if self.fits:
            self.evaluated = self.unproven or self.evaluated
            self.unproven = None
        self.known = step + 1
        self.first = loss if step == 0 else self.first
        self.recent = (*self.recent, loss)[-PERSIST:]
        self.last = (*self.last, loss)[-LASTING:]
        self.least = min(self.least, loss)
        if (not self.past or len(self.recent) == PERSIST) and max(
            self.recent
        ) < LEARNED * self.uniform:
            self.learned = True
        if not self.past or on_curve:
            self.past = (*self.past, loss)[-MEMORY:]
            self._judge_mean()
            self._judge_last(LASTING)
        elif self.since is None:
            self.from_trend = leaves_trend and (within or self.trend_limit < self.bar)
            self.since = step
            self.high = 1
            self.calm = 0
        elif loss > self.bar:
            self.high = min(self.high + 1, PERSIST)
            self.calm = 0
        elif not self.seen:
            most = 4 * self.limit - 3 * self.level  # higher ones would hide what comes later
            self._ends(tuple(min(loss, most) for loss in self.recent[-self.high - 1 :]))
        else:
            self.calm += 1
            if self.calm == PERSIST:
                self._ends(self.recent)

    def _judge_mean(self) -> None:
        """Begin a rise where the mean of the window is too high."""
        if len(self.past) < WINDOW:
            return
        quarter = WINDOW // 4
        mean = fmean(sorted(self.window)[quarter:-quarter])
        if self.lowest is None or mean < self.lowest[0]:
            self.lowest = mean, max(0.4 * abs(mean), 5 * self.spread, LEAST_RISE)
        elif mean > sum(self.lowest):
            self._begin_from_best()

    def _judge_last(self, count: int) -> None:
        """Begin a rise where the last `count` losses lie near that of equally likely tokens, or
        above it, and lower ones before them; or so far above it that nothing is worse.
        """
        least = min(self.past[-count:])
        is_worse = len(self.past) > count and least > self.worthless
        if is_worse or ((self.learned or self._is_low) and least > LOST * self.uniform):
            self._begin_from_best()

    def end(self) -> None:
        """The last loss of the run is known: no step is left that a rise could wait for."""
        self._judge_last(PERSIST)
        if self.since is not None and self.ends_above_its_beginning(self.known):
            self.high = PERSIST

    def add_evaluation(self, loss: float, *, ends: bool, uniform: float | None = None) -> None:
        """The loss of an evaluation after the last step is known.

        Args:
            ends: no step is left.
            uniform: that of equally likely tokens, where steps have another loss than evaluations;
                None: they have the same.
        """
        if not ends:
            self.unproven = loss if self.since is None else self.unproven
            return
        earlier = self.evaluated
        self.evaluated = loss
        self.unproven = None
        rises = earlier is not None and loss > 1.5 * earlier
        if self.since is not None and not self.seen and not rises and self.would_fit(loss):
            self._ends(())  # the high losses were those of batches
        if earlier is None:
            lost = LOST * self.uniform
            both = self.learned and 0 < self.high < PERSIST and self.recent[-1] > lost
            bar = max(self.limit, lost if both else 2 * max(self.uniform, self.first or 0.0))
            risen = 0
        else:
            bar = max(1.5 * earlier, (earlier + self.uniform) / 2)
            if self._within(earlier):  # else the data are known by heart, and validation's are not
                bar = min(bar, max(LOST * self.uniform, 1.1 * earlier))
            risen = self._risen_last if loss > max(1.2 * earlier, earlier + LEAST_RISE) else 0
        if uniform is not None:
            bar = math.inf
            if earlier is not None:
                bar = max(1.5 * earlier, (earlier + uniform) / 2)
                bar = min(bar, max(LOST * uniform, 1.1 * earlier))
        elif not self.uniform:
            bar = math.inf
            if earlier is not None and self._within(earlier):
                bar = 2 * earlier + LEAST_RISE
        if risen or loss > bar:
            self.since = self.known - risen if self.since is None else self.since
            self.high = PERSIST
            self.recent = (*self.recent, loss)[-PERSIST:]
            self.last = (loss,) * LASTING

    @property
    def _risen_last(self) -> int:
        """How many of the last losses lie above those before them; 0: their median does not."""
        before = self.past[:-LASTING][-WINDOW:]
        if len(before) < RECENT:
            return 0
        level = median(before)
        if median(self.recent) <= level + max(1.5 * _spread(before), 0.1 * abs(level)):
            return 0
        return len(list(takewhile(lambda loss: loss > level, reversed(self.last))))

    def _begin_from_best(self) -> None:
        """The last losses that all are suspect are no past, but a rise that lasts."""
        suspect = self.suspect
        risen = len(list(takewhile(lambda loss: loss > suspect, reversed(self.past[1:]))))
        if self.since is None and risen:
            self.past = self.past[:-risen]
            self.since = self.known - risen
            self.high = PERSIST
            self.from_best = True

    def _ends(self, losses: tuple[float, ...]) -> None:
        """The rise is over; these losses of it join the past."""
        self.past = (*self.past, *losses)[-MEMORY:]
        self.since = None
        self.high = 0
        self.calm = 0
        self.from_trend = False
        self.from_best = False

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


def _spread(values: Sequence[float]) -> float:
    """The standard deviation of normal values with the same median deviation from their median."""
    centre = median(values)
    return 1.4826 * median([abs(value - centre) for value in values])
