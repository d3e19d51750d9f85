"""The state that is saved when something went wrong, the last one that is whole and finite, and
what the user is told.

Of several ranks all take part, because each holds a part of what is saved; the lead decides, writes
and reports.

A GPU that runs out of memory can be mended by smaller microbatches, which leave the results of a
step as they are. One that fails (an illegal access, a bus error, a GPU that left the bus) is lost
for its process: the run goes on from its last checkpoint, in another process.
"""

import logging
import math
import re
import time
from typing import NoReturn

import torch

from fp4train import checkpoint
from fp4train.errors import LostError, UserError
from fp4train.hardware import memory_asked
from fp4train.parallel.world import AgreedError, is_broken
from fp4train.run.finite import finite_weights
from fp4train.run.record.directory import CHECKPOINTS, SAVED
from fp4train.run.run import Run
from fp4train.run.supervise.checkpoints import Outcome
from fp4train.run.supervise.divergence import (
    DivergedError,
    doubt_about,
    past_non_finite,
    rise_message,
)
from fp4train.run.supervise.guard import NonFiniteError
from fp4train.run.supervise.ledger import Ledger
from fp4train.run.supervise.run_audits import RunAudits
from fp4train.run.supervise.saving import PAUSES
from fp4train.run.supervise.watch import Watch
from fp4train.text import first_line, screen, typed


def rescue(run: Run, error: NonFiniteError) -> str:
    """Save what was before the step that failed, and say what can be done.

    Raises:
        AuditError: the state was overwritten, and audit.action is "stop".
        DivergedError: the run goes back to a checkpoint, or its loss had diverged before.
    """
    if error.of_state:  # an overwritten value is no matter of rates
        run.companions.of(RunAudits).compare_state()
    run.record.tracker.log_event(run.step + 1, "non-finite", {"message": str(error)})
    past_non_finite(run, str(error))
    finite = all_finite(run)
    if run.mid_update or not finite or error.of_state:
        run.saver.wait()
        report(run)
        outcome = "not saved" if finite else "ruined"
    else:
        outcome = (
            "saved" if save_and_wait(run, doubt=f"the next step failed: {error}") else "failed"
        )
    if run.divergence.since is not None:
        raise DivergedError(f"{error}. Before that {rise_message(run)}", None)
    steps = steps_saved(run)
    return screen(
        __package__,
        "rescue.txt",
        error=str(error),
        outcome=outcome,
        steps=steps,
        earlier=[step for step in steps if step < run.step],
        directory=str(run.directory),
    )


def save(run: Run, *, proven: bool = False, doubt: str | None = None) -> None:
    """Begin a checkpoint, which is written while the next steps run.

    Args:
        proven: an evaluation shows that the state is good.
        doubt: why the state may be useless; None: its losses tell.
    """
    run.companions.on_save()
    doubt = doubt or doubt_about(run, proven=proven)
    run.saver.begin(proven=proven and not doubt and run.divergence.is_good, doubt=doubt)


def report(run: Run) -> Outcome | None:
    """Log which checkpoints are whole, and say which could not be written: that costs the
    checkpoint, not the run.

    Returns:
        A checkpoint that was not written because weights or moments are not finite; None if there
        is none.
    """
    bad = None
    for outcome in run.saver.outcomes():
        if outcome.problem is not None:
            goes_on = run.step < run.config.train.steps
            again = " Training goes on; it is tried again." if goes_on else ""
            _log.error("%s%s", outcome.problem, again)
            run.record.tracker.log_event(
                run.step + 1, "checkpoint failed", {"reason": outcome.problem}
            )
        elif outcome.bad is not None:
            bad = bad or outcome
        else:
            run.record.tracker.log_event(outcome.step, SAVED)
    return bad


def refuse(bad: Outcome) -> NoReturn:
    """Raises NonFiniteError: a checkpoint was not written because one of its tensors is not
    finite.
    """
    what = "a tensor of the checkpoint"
    raise NonFiniteError(bad.step, what, math.nan, str(bad.bad), "its state", of_state=True)


def all_finite(run: Run) -> bool:
    """Whether the weights are finite, on every rank."""
    return run.world.everywhere(finite_weights(run.model))


def save_and_wait(run: Run, *, doubt: str | None = None) -> bool:
    """Have the state of this step written, now, and if it fails a few times more; whether it is.

    Args:
        doubt: see `save`.

    Raises:
        NonFiniteError: weights or moments are not finite.
    """
    world = run.world
    for pause in (*PAUSES, None):
        if not world.broadcast(run.saver.holds(run.step)):
            save(run, doubt=doubt)
        run.saver.wait()
        bad = report(run)
        written, bad = world.broadcast((run.saver.saved == run.step, bad))
        if bad is not None:
            refuse(bad)
        if written:
            return True
        if pause is not None:
            time.sleep(pause)
    return False


def save_at_end(run: Run) -> bool:
    """The last checkpoint of a run; whether it is written."""
    watch = run.companions.of(Watch)
    if run.world.broadcast(watch.look() is not None and watch.lost):
        _log.error("%s; nothing is saved there", watch.trouble)
        return False
    return save_and_wait(run)


def keep_what_is_whole(run: Run, ledger: Ledger, error: Exception) -> None:
    """Save what can be saved when something went wrong, and say what is there.

    Of several ranks nothing can be saved unless all raise it at one place: an error of one finds
        the others in a
    collective, each with a part.
    """
    world = run.world
    watch = run.companions.of(Watch)
    if world.size > 1 and not isinstance(error, AgreedError):
        if is_broken(error):
            run.record.tracker.log_event(run.step + 1, "lost rank", {"message": first_line(error)})
        return
    try:
        # the step before; it may have failed, and then its beginning is what is whole
        ledger.flush()
    except Exception as later_error:  # the first error is the one to tell
        _log.error("%s", later_error)
    if run.mid_update or world.broadcast(watch.look() is not None and watch.lost):
        _log.error(
            "step %d was interrupted while the weights were updated; they are not saved", run.step
        )
    else:
        try:
            run.record.tracker.log_event(
                run.step + 1, "error", {"message": f"{type(error).__name__}: {error}"}
            )
            saved = all_finite(run) and save_and_wait(run)
        except Exception as later_error:  # the first error is the one to tell
            _log.error("nothing could be saved: %s", later_error)
        else:
            _log.error(
                "step %d failed; %s",
                run.step,
                "its beginning is saved" if saved else "nothing could be saved",
            )


def steps_saved(run: Run) -> list[int]:
    """The steps that have a checkpoint."""
    try:
        return checkpoint.steps(run.directory / CHECKPOINTS)
    except UserError:
        return []


_log = logging.getLogger(__name__)

_FAILED = re.compile(
    r"CUDA error|CUBLAS_STATUS_(?!NOT_SUPPORTED|INVALID_VALUE)\w+|NCCL error|device-side assert"
)


def explain(error: Exception, run: Run) -> UserError | None:
    """An error that says what to do about one of the GPU or for want of memory that ended `run`;
    None for any other.
    """
    text = next(iter(str(error).splitlines()), "")
    if asked := memory_asked(error):
        return UserError(
            f"{run.directory}: step {run.step} does not fit into memory: {asked}. {_smaller(run)}"
        )
    if not isinstance(error, RuntimeError) or not _FAILED.search(str(error)):
        return None
    if run.device.type == "cuda":
        where = torch.cuda.get_device_name(run.device)
    else:
        where = str(run.device)
    return LostError(
        f"{run.directory}: the GPU failed in step {run.step} ({where}, {run.device}): "
        f"{text.rstrip('.')}. This process "
        "cannot use it any more; nvidia-smi and the kernel's log (NVRM: Xid) tell why. "
        f"{_resume_advice(run)}"
    )


def _smaller(run: Run) -> str:
    """How to go on with settings that take less memory."""
    rows = run.microbatch_rows
    batch = run.config.train.batch_size
    tries = []
    if fewer := next((n for n in range(rows // 2, 0, -1) if batch % n == 0), None):
        tries.append(f"train.microbatch={fewer} (the same gradients)")
    if getattr(run.config.model, "recompute", True) is False:
        tries.append("model.recompute=true (keeps only the inputs of the blocks)")
    if not tries:
        tries.append("a smaller model or train.seq_len, or more GPUs")
    return _resume_advice(run, f" with {' or '.join(tries)}")


def _resume_advice(run: Run, how: str = "") -> str:
    """The newest checkpoint, and how to go on from it."""
    if steps := steps_saved(run):
        return (
            f"The checkpoint of step {steps[-1]} stays: resume={typed(run.directory)} goes on{how}"
        )
    return f"There is no checkpoint: begin again{how}"
