"""What is saved when, and when something went wrong: the last state that is whole and finite, and a word about it.

Of several ranks all take part, because each holds a part of what is saved; the lead decides, writes and reports.
"""

from __future__ import annotations

import logging
import math
import time
from typing import NoReturn

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.run.record.directory import CHECKPOINTS, REMOVED, SAVED
from fp4train.run.run import Run
from fp4train.run.supervise.divergence import past_non_finite, rise, worthless
from fp4train.run.supervise.guard import NonFiniteError, finite_weights
from fp4train.run.supervise.ledger import Ledger
from fp4train.run.supervise.saving import PAUSES, Outcome
from fp4train.run.supervise.watch import Watch

_log = logging.getLogger(__name__)


def rescue(run: Run, error: NonFiniteError) -> str:
    """Save what was before the step that failed, and say what can be done.

    Raises:
        DivergedError: the run goes back to a checkpoint.
    """
    run.tracker.log_event(run.step + 1, "non-finite", {"message": str(error)})
    past_non_finite(run, str(error))
    finite = all_finite(run)
    if run.divergence.since is not None:
        run.saver.forsake(run.divergence.since)
        run.saver.wait()
        report(run)
        return f"{error}. Before that {rise(run)}"
    if run.mid_update or not finite or error.of_state:
        run.saver.wait()
        report(run)
        there = steps_saved(run)
        last = "The weights are not finite themselves" if not finite else "This state is not saved"
        last += f"; the last checkpoint is from before, step {there[-1]}" if there else "; there is no checkpoint"
    elif save_and_wait(run):
        before = [step for step in steps_saved(run) if step < run.step]
        last = "A checkpoint from before this step is saved"
        last += f", the one of step {before[-1]} is kept (resume_step={before[-1]})" if before else ""
    else:
        last = "No checkpoint could be written"
    how, where = ("Go on", f"resume={run.directory}") if steps_saved(run) else ("Begin again", "run.overwrite=true")
    return (
        f"{error}. {last}. {how} with another recipe, more layers in high precision (policy.last) or a lower rate: "
        f"{where} recipe=… optim.lr=…"
    )


def save(run: Run, *, proven: bool = False) -> None:
    """Begin a checkpoint, which is written while the next steps run; none of a ruined state that would stand alone."""
    if not worthless(run):
        run.saver.begin(proven=proven and run.divergence.since is None)


def report(run: Run) -> Outcome | None:
    """Log which checkpoints are whole, and say which could not be written: that costs the checkpoint, not the run.

    Returns:
        A checkpoint that was not written because weights or moments are not finite; None if there is none.
    """
    bad = None
    for outcome in run.saver.outcomes():
        if outcome.problem is not None:
            _log.error("%s Training goes on; it is tried again.", outcome.problem)
            run.tracker.log_event(run.step + 1, "checkpoint failed", {"reason": outcome.problem})
        elif outcome.bad is not None:
            bad = bad or outcome
        else:
            run.tracker.log_event(outcome.step, REMOVED if outcome.removed else SAVED)
    return bad


def refuse(bad: Outcome) -> NoReturn:
    """Raises NonFiniteError: a checkpoint was not written because one of its tensors is not finite."""
    what = "a tensor of the checkpoint"
    raise NonFiniteError(bad.step, what, math.nan, str(bad.bad), "its state", of_state=True)


def all_finite(run: Run) -> bool:
    """Whether the weights are finite, on every rank."""
    return run.world.everywhere(finite_weights(run.model))


def save_and_wait(run: Run, *, proven: bool = False) -> bool:
    """Have the state of this step written, now, and if it fails a few times more; whether it is.

    Raises:
        NonFiniteError: weights or moments are not finite.
    """
    world = run.world
    for pause in (*PAUSES, None):
        if not world.of_lead(run.saver.holds(run.step)):
            save(run, proven=proven)
        run.saver.wait()
        bad = report(run)
        written, bad = world.of_lead((run.saver.saved == run.step, bad))
        if bad is not None:
            refuse(bad)
        if written:
            return True
        if pause is not None:
            time.sleep(pause)
    return False


def save_at_end(run: Run, watch: Watch) -> bool:
    """The last checkpoint of a run; whether it is written, or the run is done and its end not worth it."""
    if run.world.of_lead(watch.look() is not None and watch.lost):
        _log.error("%s; nothing is saved there", watch.trouble)
        return False
    if worthless(run):
        report(run)
        return run.step == run.config.train.steps
    return save_and_wait(run)


def keep_what_is_whole(run: Run, ledger: Ledger, watch: Watch, error: Exception) -> None:
    """Save what can be saved when something went wrong, and say what is there.

    Of several ranks nothing can be saved: an error of one finds the others in a collective, each with a part.
    """
    if run.world.size > 1:
        return
    try:
        ledger.settle()  # the step before; it may have failed, and then its beginning is what is whole
    except Exception as second:  # the first error is the one to tell
        _log.error("%s", second)
    if run.mid_update or (watch.look() is not None and watch.lost):
        _log.error("step %d was interrupted while the weights were updated; they are not saved", run.step)
    else:
        try:
            run.tracker.log_event(run.step + 1, "error", {"message": f"{type(error).__name__}: {error}"})
            saved = all_finite(run) and save_and_wait(run)
        except Exception as second:  # the first error is the one to tell
            _log.error("nothing could be saved: %s", second)
        else:
            _log.error("step %d failed; %s", run.step, "its beginning is saved" if saved else "nothing could be saved")


def steps_saved(run: Run) -> list[int]:
    """The steps that have a checkpoint."""
    try:
        return checkpoint.steps(run.directory / CHECKPOINTS)
    except UserError:
        return []
