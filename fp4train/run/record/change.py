"""Changes of a run while it trains: its recipe is swapped, or a swap that has not begun is taken
back.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.hardware import Device
from fp4train.precision import Timeline
from fp4train.precision.plan import Plan
from fp4train.run.build import build_plan
from fp4train.run.origin import write_plan
from fp4train.run.record.inbox import EVALUATION
from fp4train.run.record.journal import CANCELLED, RecipeChoice, SwapEntry, typed_swap
from fp4train.run.run import Run
from fp4train.run.timeline import with_swap
from fp4train.text import counted, counted_are

_log = logging.getLogger(__name__)


def pick_up_swaps(run: Run) -> bool:
    """Carry out what `fp4train swap` asked for since the last step; refuse what is impossible;
    answer either way.

    Returns:
        Whether the recipe of a coming step may have changed.
    """
    old_timeline = run.course.timeline
    done = {record.values.get("request") for record in run.record.journal.records}
    for request in run.record.inbox.take(done):
        body = request.body or {}
        if EVALUATION in body:
            run.record.inbox.answer(request, *log_evaluation(run, body[EVALUATION]))
            continue
        name = str(body.get("name", ""))
        try:
            if request.body is None:
                raise UserError(request.problem)
            at = run.step if body["at"] is None else bind(body["at"], int, "at")
            swap_recipe(run, at, body["recipe"], name, request.id)
        except UserError as error:
            _log.error("swap%s refused: %s", f" to {name}" if name else "", error)
            refused = {"recipe": name, "reason": str(error), "request": request.id}
            run.record.tracker.log_event(run.step, "swap refused", refused)
            run.record.inbox.answer(request, False, str(error))
            continue
        event = "swap"
        text = f"recipe {name} from step {at} on"
        values = {"recipe": name, "at": at, "request": request.id}
        if body["recipe"] is None:
            event = CANCELLED
            text = f"the swap at step {at} is cancelled"
            del values["recipe"]
        _log.warning("swap: %s", text)
        run.record.tracker.log_event(run.step, event, values)
        run.record.inbox.answer(request, True, text)
    return run.course.timeline is not old_timeline


def log_evaluation(run: Run, body: Any) -> tuple[bool, str]:
    """Log the results that `fp4train eval` found on a checkpoint of this run: (whether they are
    some, a sentence).
    """
    try:
        step = int(body["step"])
        scores = [dict(score) for score in body["scores"]]
        if any(
            key not in ("task", "recipe") and not key.startswith("eval/")
            for score in scores
            for key in score
        ):
            raise ValueError("a value that no evaluation has")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        _log.error("results of an evaluation are refused: %s", error)
        return False, f"these are no results of an evaluation ({error})"
    for score in scores:
        run.record.tracker.log_event(step, EVALUATION, score)
    return True, f"{len(scores)} results are recorded in its metrics"


def follow_swaps(run: Run, entries: Sequence[SwapEntry]) -> None:
    """Go on by the swaps that the lead has recorded, on a rank that records nothing."""
    run.course.timeline = replace(run.course.timeline, swaps=tuple(map(typed_swap, entries)))
    run.course.plan = _plan(run, run.course.timeline)


def swap_recipe(
    run: Run, step: int, recipe: dict[str, Any] | None, name: str, request: str | None = None
) -> None:
    """Swap the recipe from `step` on: recorded for good, timeline and plan brought up to date.

    Args:
        recipe: the recipe as plain configuration; None: the swap at `step`, which has not begun,
            is taken back.
        name: name that the user gave it.
        request: the ID of the request that asked for it.

    Raises:
        UserError: the swap is impossible; nothing has changed then.
    """
    steps = run.config.train.steps
    if step < run.step:
        raise UserError(f"step {step} is past: {counted_are(run.step, 'step')} done")
    if step >= steps:
        raise UserError(f"step {step} is beyond the end: the run has {counted(steps, 'step')}")
    if recipe is not None:
        timeline = with_swap(run.course.timeline, RecipeChoice(name, recipe).at(step))
        values = {"name": name, "at": step, "recipe": recipe}
        _change(run, timeline, "swap", {**values, "request": request})
        return
    left = tuple(swap for swap in run.course.timeline.swaps if swap.step != step)
    if left == run.course.timeline.swaps:
        raise UserError(f"there is no swap at step {step}")
    _change(
        run, replace(run.course.timeline, swaps=left), CANCELLED, {"at": step, "request": request}
    )


def _plan(run: Run, timeline: Timeline) -> Plan:
    mesh = run.world.mesh
    device = Device.of(run.device)
    plan = build_plan(run.config, run.layers, timeline, device, mesh)
    return plan.since(run.step)


def _change(run: Run, timeline: Timeline, event: str, values: Mapping[str, Any]) -> None:
    """The run goes on by `timeline`, as the journal says from now on.

    Raises:
        UserError: the journal cannot be written; nothing has changed then.
    """
    plan = _plan(run, timeline)
    sentences = run.gathers()
    journal = run.record.journal
    journal.add(event, run.step, plan, **values)
    run.record.inbox.record(journal, lambda: write_plan(run.directory, journal.records, sentences))
    run.course.timeline = timeline
    run.course.plan = plan
