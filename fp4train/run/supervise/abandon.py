"""The checkpoints of later steps, which a run that goes on from an earlier one abandons."""

import logging

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.run.record import directory as run_directory
from fp4train.run.run import Run

_log = logging.getLogger(__name__)


def abandon_later(run: Run, doubt: str | None, *, even_if_none: bool = False) -> None:
    """Write the state that the run goes on from anew, which removes the checkpoints of later steps.

    None of them must be found as the newest.

    Args:
        doubt: why that state may be useless; None: no reason is known.
        even_if_none: the state is another than that of its checkpoint.

    Raises:
        UserError: it could not be written.
    """
    newest = run.world.broadcast(
        checkpoint.steps(run.directory / run_directory.CHECKPOINTS)[-1] if run.world.lead else 0
    )
    if not even_if_none:
        if newest <= run.step:
            return
        _log.warning(
            "steps %d–%d are abandoned; run.name=… would have kept them", run.step, newest - 1
        )
    begun = run.saver.begin(proven=doubt is None, doubt=doubt)
    with run.world.same_outcome():
        if not run.world.lead:
            return
        run.saver.wait()
        outcomes = run.saver.outcomes()
        if not begun or not outcomes or not outcomes[-1].written:
            why = next(
                (o.problem or f"{o.bad} is not finite" for o in reversed(outcomes)),
                "it is not written in time",
            )
            run.saver.close()
            raise UserError(f"resume_step={run.step}: the later steps cannot be abandoned: {why}")
