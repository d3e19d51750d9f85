"""Results of evaluations, kept with the run that they are of: as events in its metrics, and so in its tracker.

    {"step": 300, "event": "evaluation", "task": "held-out text", "recipe": "NVFP4", "eval/loss": 1.66, …}

The step is that of the checkpoint, so that a resume from before it leaves the event out with all else that it undoes.
Where no process trains in the directory, this one holds its lock and appends to the log. Where one does, the log is
that one's, and it is asked to log the results between two steps, as it is asked for swaps (`run/record/inbox.py`).
"""

from collections.abc import Sequence
from typing import Any

from fp4train.config.schema import plain
from fp4train.exchange.evaluation import Score
from fp4train.exchange.trained import TrainedModel
from fp4train.run.record import directory as run_directory
from fp4train.run.record.inbox import EVALUATION, ask, cancel_request, wait_for_answer
from fp4train.track import NullTracker, read_metrics
from fp4train.track.config import METRICS

WAIT = 10.0
"""Seconds for the answer of the process that trains."""


def record(trained: TrainedModel, scores: Sequence[Score]) -> str:
    """Keep scores with the run; a sentence that says where.

    Raises:
        UserError: the run's metrics cannot be read or written.
    """
    if trained.step is None:
        return f"{trained.source} is no run: not recorded"
    source, entries = trained.source, [_entry(score) for score in scores]
    if run_directory.is_running(source):
        request = ask(source, {EVALUATION: {"step": trained.step, "scores": entries}})
        answer = wait_for_answer(source, request, WAIT)
        ended = answer is None and not run_directory.is_running(source)
        if answer is None and not (ended and cancel_request(source, request)):
            return f"{source} is asked to record this: it does so between two steps, or when it is resumed"
        if answer is not None:
            return f"{source}: {answer[1]}"
    with run_directory.locked(source, "another process uses it: run the command again to record the results"):
        path = source / METRICS
        last = max((int(line["step"]) for line in read_metrics(path)), default=0) if path.exists() else 0
        # No line is of a later step than this, so that none is dropped.
        end = max(last, trained.config.train.steps)
        tracker = trained.config.track.build(source, trained.config.run.name, plain(trained.cfg), resume_step=end)
        try:
            for entry in entries:
                tracker.log_event(trained.step, EVALUATION, entry)
        finally:
            tracker.finish()
    return f"{source} has no metrics (track=none): not recorded" if isinstance(tracker, NullTracker) else str(path)


def _entry(score: Score) -> dict[str, Any]:
    return {"task": score.task, "recipe": score.recipe, **{f"eval/{key}": value for key, value in score.values.items()}}
