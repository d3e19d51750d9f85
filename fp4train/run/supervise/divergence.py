"""A loss far above its own past (`loss_history`) is answered as `train.on_divergence` says.

The loss against a teacher begins near 0, where no relative limit says anything: it is judged as one
`TAUGHT` higher. A student's evaluations, whose loss is that of the targets, are judged by earlier ones.

The history is part of checkpoints, so that a resumed run judges as one that was not interrupted.
Losses are read one step late (`ledger`): when the fifth one is read, one more step may be queued.
It is abandoned, too, but its batch is not skipped, so that where a run goes on does not depend on
when its losses are read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from fp4train import checkpoint
from fp4train.companion import RunCompanion
from fp4train.config.binding import bind
from fp4train.parallel.world import AgreedError
from fp4train.run.queued import Step, Values
from fp4train.run.record.directory import CHECKPOINTS
from fp4train.run.supervise.loss_history import HISTORY, Divergence, Rewind
from fp4train.text import typed

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

TAUGHT = 1.0
"""Nats per token that the loss against a teacher is judged higher."""


class DivergedError(AgreedError):
    """The loss of a run diverged, and it goes back to a checkpoint or ends.

    Args:
        rewind: how the run goes on; None: it has ended.
    """

    exit_code = 3
    """Exit code of every run whose loss has diverged when it ends."""

    def __init__(self, message: str, rewind: Rewind | None) -> None:
        super().__init__(message)
        self.rewind = rewind


class FollowedLoss(RunCompanion):
    """Takes note of the loss of each step, and says at once that it diverged, or is back.

    Weights that gave a loss that fits the curve before it are good, as far as it can tell: their
    checkpoint is proven.
    """

    def on_numbers(self, run: Run, step: Step, values: Values) -> None:
        loss, _ = step.read()
        divergence = run.divergence
        number = step.index + 1
        base = _base(run)
        since = divergence.since
        seen_before = divergence.seen
        if since is None and run.begins_stage(step.index):
            divergence = run.divergence = divergence.anew()
        divergence.add(step.index, loss + base)
        ends = number == run.config.train.steps
        if ends:
            divergence.end()
        if (evaluated := values.get("val/loss_recipe")) is not None:
            taught = None
            if run.teacher is not None:
                taught = math.log(run.data.training.vocab_size) + base
            divergence.add_evaluation(float(evaluated) + base, ends=ends, uniform=taught)
        if divergence.since is not None and divergence.seen and not seen_before:
            run.saver.set_doubt(divergence.since, rise_message(run, advice=False))
            run.saver.wait()  # so that it is known which checkpoint is good
            if run.config.train.on_divergence == "warn":
                _log.warning("step %d: %s", number, rise_message(run))
            details = {
                "loss": divergence.recent[-1] - base,
                "level": divergence.measured_from[0] - base,
                "since": divergence.since + 1,
            }
            run.record.tracker.log_event(number, "divergence", details)
        elif seen_before and not divergence.seen:
            _log.warning("step %d: the loss is %.4g, back within its past", number, loss)
            run.record.tracker.log_event(number, "divergence over", {"loss": loss})
        elif since is not None and divergence.since is None:
            run.saver.set_doubt(since, None)
        if divergence.is_good:
            run.saver.prove(step.index)


def proven_by(run: Run, evaluated: Mapping[str, float | str]) -> bool:
    """Whether an evaluation shows that the current state is good: its loss in the recipe fits the
    curve of the losses before it. Where it does not, as where the data of both differ, the loss of
    the next step decides.
    """
    return run.divergence.would_fit(float(evaluated["val/loss_recipe"]) + _base(run))


def verdict(run: Run) -> str | None:
    """The message about the losses at the end of a run; None: there is nothing to report."""
    if run.divergence.since is not None:
        word = "diverged" if run.divergence.beyond_noise else "doubtful"
        return f"{word}: {rise_message(run)}"
    if (text := _end_message(run)) is None:
        return None
    run.record.tracker.log_event(run.step, "divergence", {"message": text})
    return f"{text}. {_advice(run)}"


def _end_message(run: Run) -> str | None:
    """The message about a run that is done and ends above where it began; None about any other."""
    divergence = run.divergence
    if run.step < run.config.train.steps or not divergence.ends_above_its_beginning(run.step):
        return None
    first_excess = (divergence.first or 0.0) - _base(run)
    last = median(divergence.recent) - _base(run)
    return f"the run ends above where it began (loss {last:.4g} against {first_excess:.4g})"


def doubt_about(run: Run, *, proven: bool) -> str | None:
    """Why the current state may be useless, as its losses tell; None: they do not, or an evaluation
    has `proven` that the last ones were noise of batches.
    """
    if run.divergence.since is None:
        return _end_message(run)
    return rise_message(run, advice=False) if run.divergence.seen or not proven else None


def ended_diverged(saved: checkpoint.Checkpoint) -> bool:
    """Whether the run had diverged when it ended with this checkpoint."""
    if saved.doubt is None:
        return False
    history: Divergence = bind(
        checkpoint.unflatten({}, {HISTORY: saved.state[HISTORY]})[HISTORY], Divergence, HISTORY
    )
    return history.beyond_noise


def divergence_request(run: Run) -> dict[str, Any] | None:
    """The lead's decision about a divergence, for `end_or_rewind` on every rank; None: nothing is
    to be done.
    """
    if not run.divergence.seen or run.config.train.on_divergence == "warn":
        return None
    back, why = _milestone(run)
    return {
        "back": back,
        "message": f"step {run.divergence.known}: {why}{rise_message(run, advice=back is None)}",
    }


def end_or_rewind(run: Run, request: dict[str, Any]) -> None:
    """Raises DivergedError on every rank."""
    back = request["back"]
    raise DivergedError(
        request["message"],
        None if back is None else run.divergence.rewind(back, run.divergence.known),
    )


def past_non_finite(run: Run, message: str) -> None:
    """Raises DivergedError where a run whose current step is not finite goes back instead of
    ending.
    """
    back = run.world.broadcast(_milestone(run)[0] if run.world.lead else None)
    if back is not None:
        raise DivergedError(message, run.divergence.rewind(back, run.step + 1))


def _milestone(run: Run) -> tuple[int | None, str]:
    """The checkpoint to go back to; None: the run ends, for the reason given."""
    divergence = run.divergence
    settings = run.config.train
    if settings.on_divergence != "rewind":
        return None, ""
    run.saver.wait()  # the one that is being written may be it
    if (good := run.saver.good) is None:
        return None, "there is no checkpoint to go back to; "
    if divergence.rewinds >= settings.rewinds:
        return None, f"the run went back {divergence.rewinds} times (train.rewinds); "
    older = [step for step in checkpoint.steps(run.directory / CHECKPOINTS) if step < good]
    again = divergence.skips and divergence.skips[-1][0] == good
    return (older[-1] if older and again else good), ""


def take_over(run: Run, rewind: Rewind) -> None:
    """The run, restored to the milestone, goes on as `rewind` says."""
    run.divergence = replace(run.divergence, rewinds=rewind.rewinds, skips=rewind.skips)
    _log.warning(
        "going on from step %d; batches %d–%d are skipped", rewind.step, *rewind.record["skipped"]
    )


def rise_message(run: Run, *, advice: bool = True) -> str:
    """Message about the current rise of the loss, with the advice what to do."""
    divergence = run.divergence
    assert divergence.since is not None
    base = _base(run)
    since = f"step {min(divergence.since + 1, divergence.known)}"
    loss = divergence.recent[-1] - base
    level, limit = divergence.measured_from
    past = f"far above its past ({level - base:.4g})"
    name = "loss"
    if divergence.recent[-1] == divergence.evaluated:
        name = "validation loss"
        if run.teacher is not None:  # another loss than that of the steps
            past = "far above its past"
    text = f"the {name} is {loss:.4g}, {past}, since {since}"
    if loss + base <= limit:
        text = f"the {name} rose {past} in {since} and is not back, at {loss:.4g}"
    return f"{text}. {_advice(run)}" if advice else text


def _base(run: Run) -> float:
    return 0.0 if run.teacher is None else TAUGHT


def _advice(run: Run) -> str:
    if run.saver.good is None:
        return (
            "No checkpoint of this run is good: start over with the command that began it and a "
            "lower rate (optim.lr=… run.overwrite=true)"
        )
    if run.config.train.on_divergence == "rewind":
        skip = ""
    else:
        skip = ", or past these batches (train.on_divergence=rewind)"
    return (
        f"The last good checkpoint is that of step {run.saver.good}: go on from it with a "
        "lower rate "
        f"(resume={typed(run.directory)} resume_step={run.saver.good} optim.lr=…){skip}"
    )
