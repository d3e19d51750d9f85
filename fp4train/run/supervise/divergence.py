"""A loss far above its own past: seen as the losses are read, and answered as `train.on_divergence` says.

The past of a loss is the last `WINDOW` = 32 losses that were within their own past. With its median m, its spread
s = 1.4826 · median |loss − m|, its ceiling c (the second largest loss, so that a single outlier is not the measure) and
the number n of its losses,

    limit = max(c, m + max(6 s, (0.2 + 1.6 / n) |m|))

A loss above the limit begins a rise, which lasts while losses are above c. After `PERSIST` = 5 losses it is a
divergence, which ends when 5 losses in a row are within c again. A rise that ends earlier is noise of a batch, and
joins the past. A loss that falls, as in the warm-up, never reaches its limit; few losses have a wide one, because their
spread says little.

The loss against a teacher begins near 0, where no relative limit says anything: it is judged as one `TAUGHT` higher.

A run that ends with its last 5 losses (their median) above its first one by more than max(3 s, (0.02 + 2 / steps)
|first|) ended above where it began.

All of this is part of checkpoints, so that a resumed run judges as one that was not interrupted. Losses are read one
step late (`ledger`): when the fifth one is read, one more step may be queued. It is abandoned, too, but its batch is
not skipped, so that where a run goes on does not depend on when its losses are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from fp4train import checkpoint
from fp4train.config.schema import MOST_STEPS
from fp4train.parallel.world import AgreedError
from fp4train.run.record.directory import CHECKPOINTS

if TYPE_CHECKING:
    from fp4train.run.run import Run
    from fp4train.run.supervise.ledger import Step, Values

_log = logging.getLogger(__name__)

WINDOW = 32
PERSIST = 5
TAUGHT = 1.0
"""Nats per token that the loss against a teacher is judged higher."""


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """The return of a run to a milestone.

    Args:
        step: of the milestone.
        rewinds: of the whole run, this one included; skips: as `Divergence` has them from now on.
        record: for history and metrics: the step (from 1) whose loss began to rise, and the first and the last of the
            batches that are skipped now, by their place in the data (from 0).
    """

    step: int
    rewinds: int
    skips: tuple[tuple[int, int], ...]
    record: dict[str, Any]


class DivergedError(AgreedError):
    """The loss of a run diverged, and train.on_divergence is not "warn".

    Args:
        rewind: how the run goes on; None: it has ended.
    """

    def __init__(self, message: str, rewind: Rewind | None) -> None:
        super().__init__(message)
        self.rewind = rewind


@dataclass(kw_only=True)
class Divergence:
    """The history of a run's losses.

    Args:
        known: steps whose losses were read.
        first: the first loss of the run; None: none was read, or the run began before it was kept.
        past: the last losses that were within their past.
        recent: the last `PERSIST` losses.
        since: the step (from 0) whose loss began the current rise; None: the last loss is within its past.
        high: losses of the rise; calm: those within the ceiling since the last one above it.
        rewinds: how often the run went back to a milestone.
        skips: (step, batches): from that step on, up to the next entry, so many batches of the data were skipped.
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
            raise ValueError("a rise of the loss, its steps and the past before it do not go together")
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
        return max(self.ceiling, level + max(6 * self.spread, (0.2 + 1.6 / len(self.past)) * abs(level)))

    def add(self, step: int, loss: float) -> None:
        """The loss of step `step` (from 0) is known."""
        self.known, self.first = step + 1, loss if step == 0 else self.first
        self.recent = (*self.recent, loss)[-PERSIST:]
        if not self.past or (self.since is None and (loss <= self.ceiling or loss <= self.limit)):
            self.past = (*self.past, loss)[-WINDOW:]
        elif self.since is None:
            self.since, self.high, self.calm = step, 1, 0
        elif loss > self.ceiling:
            self.high, self.calm = min(self.high + 1, PERSIST), 0
        elif not self.seen:
            self.past = (*self.past, *self.recent[-self.high - 1 :])[-WINDOW:]
            self.since, self.high = None, 0
        else:
            self.calm += 1
            if self.calm == PERSIST:
                self.past = (*self.past, *self.recent)[-WINDOW:]
                self.since, self.high, self.calm = None, 0, 0

    def ends_above_its_beginning(self, steps: int) -> bool:
        """Whether a run of `steps` steps does that."""
        if self.first is None or steps < 2:
            return False
        margin = max(3 * self.spread, (0.02 + 2 / steps) * abs(self.first))
        return median(self.recent) > self.first + margin

    def skipped(self, step: int) -> int:
        """Batches of the data that were skipped before the one of step `step`."""
        return next((batches for first, batches in reversed(self.skips) if first <= step), 0)

    def rewind(self, step: int, done: int) -> Rewind:
        """Back to the milestone of step `step`, and past the batches of all steps up to `done`."""
        first, last = step + self.skipped(step), done + self.skipped(done) - 1
        skips = (*(each for each in self.skips if each[0] < step), (step, last + 1 - step))
        record = {"diverged": done if self.since is None else self.since + 1, "skipped": [first, last]}
        return Rewind(step=step, rewinds=self.rewinds + 1, skips=skips, record=record)


def follow(run: Run, step: Step, loss: float) -> Values:
    """Take note of the loss of a step, and say at once that it diverged, or is back.

    Weights that gave a loss within its past are good, as far as it can tell: their checkpoint is proven.
    """
    found, number, base = run.divergence, step.index + 1, _base(run)
    before = found.seen
    found.add(step.index, loss + base)
    if found.since is not None and number == run.config.train.steps and found.ends_above_its_beginning(number):
        found.high = PERSIST  # no step is left to wait for
    if found.since is not None and found.seen and not before:
        run.saver.discard_ruined(found.since)
        run.saver.wait()  # so that it is known which checkpoint is good
        if run.config.train.on_divergence == "warn":
            _log.warning("step %d: %s", number, rise(run))
        values = {"loss": loss, "level": found.level - base, "since": found.since + 1}
        run.tracker.log_event(number, "divergence", values)
    elif before and not found.seen:
        _log.warning("step %d: the loss is %.4g, back within its past", number, loss)
        run.tracker.log_event(number, "divergence over", {"loss": loss})
    if found.since is None:
        run.saver.prove(step.index)
    return {}


def verdict(run: Run) -> str | None:
    """The message about the losses at the end of a run; None: there is nothing to report."""
    found = run.divergence
    if found.seen:
        return f"diverged: {rise(run)}"
    if run.step < run.config.train.steps or not found.ends_above_its_beginning(run.step):
        return None
    first, last = (found.first or 0.0) - _base(run), median(found.recent) - _base(run)
    text = f"the run ends above where it began (loss {last:.4g} against {first:.4g})"
    run.tracker.log_event(run.step, "divergence", {"message": text})
    return f"{text}. {_advice(run)}"


def divergence_request(run: Run) -> dict[str, Any] | None:
    """The lead's decision about a divergence, for `end_or_rewind` on every rank; None: nothing is to be done."""
    if not run.divergence.seen or run.config.train.on_divergence == "warn":
        return None
    back, why = _milestone(run)
    return {"back": back, "message": f"step {run.divergence.known}: {why}{rise(run, advice=back is None)}"}


def end_or_rewind(run: Run, request: dict[str, Any]) -> None:
    """Raises DivergedError on every rank."""
    back = request["back"]
    raise DivergedError(request["message"], None if back is None else run.divergence.rewind(back, run.divergence.known))


def past_non_finite(run: Run, message: str) -> None:
    """Raises DivergedError where a run whose current step is not finite goes back instead of ending."""
    back = run.world.of_lead(_milestone(run)[0] if run.world.lead else None)
    if back is not None:
        raise DivergedError(message, run.divergence.rewind(back, run.step + 1))


def _milestone(run: Run) -> tuple[int | None, str]:
    """The checkpoint to go back to; None: the run ends, for the reason given."""
    found, settings = run.divergence, run.config.train
    if settings.on_divergence != "rewind":
        return None, ""
    run.saver.wait()  # the one that is being written may be it
    if (good := run.saver.good) is None:
        return None, "there is no checkpoint to go back to; "
    if found.rewinds >= settings.rewinds:
        return None, f"the run went back {found.rewinds} times (train.rewinds); "
    older = [step for step in checkpoint.steps(run.directory / CHECKPOINTS) if step < good]
    again = found.skips and found.skips[-1][0] == good
    return (older[-1] if older and again else good), ""


def take_over(run: Run, rewind: Rewind) -> None:
    """The run, restored to the milestone, goes on as `rewind` says."""
    run.divergence = replace(run.divergence, rewinds=rewind.rewinds, skips=rewind.skips)
    _log.warning("going on from step %d; batches %d–%d are skipped", rewind.step, *rewind.record["skipped"])


def worthless(run: Run) -> bool:
    """Whether the state of a run is ruined and no checkpoint is good: it would be the only one."""
    return run.world.of_lead(run.divergence.seen and run.saver.good is None)


def rise(run: Run, *, advice: bool = True) -> str:
    """Message about the current rise of the loss, with the advice what to do."""
    found = run.divergence
    assert found.since is not None
    base, since = _base(run), f"step {found.since + 1}"
    loss, past = found.recent[-1] - base, f"far above its past ({found.level - base:.4g})"
    text = f"the loss is {loss:.4g}, {past}, since {since}"
    if loss + base <= found.limit:
        text = f"the loss rose {past} in {since} and is not back, at {loss:.4g}"
    return f"{text}. {_advice(run)}" if advice else text


def _base(run: Run) -> float:
    return 0.0 if run.teacher is None else TAUGHT


def _advice(run: Run) -> str:
    if run.saver.good is None:
        return "No checkpoint is good, and none is kept: start over with a lower optim.lr (run.overwrite=true)"
    skip = "" if run.config.train.on_divergence == "rewind" else ", or past these batches (train.on_divergence=rewind)"
    return (
        f"The last good checkpoint is that of step {run.saver.good}: go on from it with a lower rate "
        f"(resume={run.directory} resume_step={run.saver.good} optim.lr=…){skip}"
    )
