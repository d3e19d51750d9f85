"""The training loop: an optimizer step is `train_step`, what surrounds it is in `train`."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fp4train.parallel.world import AgreedError
from fp4train.precision import Recipe
from fp4train.precision.plan import PlannedStretch
from fp4train.run.bits import seed_model
from fp4train.run.checks import learning_rate
from fp4train.run.evaluate import check_evaluation, evaluate
from fp4train.run.host import CollectorBetweenSteps
from fp4train.run.queued import Numbers, Step, Values, due
from fp4train.run.run import Run
from fp4train.run.state.numbers import begin_loss_scale
from fp4train.run.step import step_rows
from fp4train.run.supervise.agreement import agree, apply_requests, stop_on_signals
from fp4train.run.supervise.audit_report import AuditError
from fp4train.run.supervise.divergence import DivergedError, proven_by, verdict
from fp4train.run.supervise.guard import NonFiniteError
from fp4train.run.supervise.ledger import Ledger
from fp4train.run.supervise.rescue import keep_what_is_whole, rescue, save, save_at_end
from fp4train.run.supervise.watch import Alarm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended.

    Args:
        step: optimizer steps done.
        metrics: the last value of every logged key.
        seconds: seconds spent in the loop.
        signal: number of the signal that ended it early, or None.
        saved: whether the last checkpoint could be written.
        remark: sentence about a loss that ended too high, the lead's; None: it did not.
        diverged: whether it ended so by more than its noise.
        passes: how often it has shown its data, in words; empty: nobody knows.
    """

    step: int
    metrics: Values
    seconds: float
    signal: int | None
    saved: bool
    remark: str | None = None
    diverged: bool = False
    passes: str = ""


def train(run: Run) -> Result:
    """Train from `run.step` to the end of the configured steps, or until a signal asks it to end.

    However it ends, the last state that is whole and finite is saved first.

    Raises:
        UserError: a loss, gradient, weight or moment became NaN or infinite; or the run's directory
            went away.
        DivergedError: the loss diverged, and the run is to end, or to go back to a checkpoint.
        Exception: whatever a step raised.
    """
    config = run.config
    steps = config.train.steps
    began = time.perf_counter()
    stretch = None
    saved = True
    world = run.world
    companions = run.companions
    started = run.step
    ledger = Ledger(run)
    try:
        with (
            stop_on_signals(run, quietly=not world.lead),
            CollectorBetweenSteps() as collector,
            companions,
            Alarm(config.train.step_timeout) as watchdog,
        ):
            with _keeping_what_is_whole(run, ledger):
                while True:
                    watchdog.set()
                    agreed = agree(run)
                    apply_requests(run, ledger, agreed.requests)
                    if run.step >= steps or agreed.ends:
                        break
                    stretch = enter_stretch(run, stretch)
                    companions.before_step()
                    step = train_step(run, stretch.recipe)
                    run.step += 1
                    run.mid_update = False
                    step.values |= agreed.values
                    ledger.add(step)
                    evaluating = due(run.step, config.eval.every, steps)
                    if evaluating:
                        values = _evaluated(run, ledger, stretch)
                    if due(run.step, config.checkpoint.every, steps):
                        ledger.flush()
                        save(run, proven=evaluating and proven_by(run, values))
                    collector.after(run.step)
                ledger.flush()
                saved = run.step == started or save_at_end(run)
            signal = world.largest_numbers(run.signal or 0)[0] or None
        if trouble := world.first(companions.trouble):
            raise AgreedError(f"{trouble}; the run ended after step {run.step}")
    finally:
        run.data.feed.close()
        run.saver.close()
        run.record.inbox.close()  # after the saver, which has records written
    return Result(
        step=run.step,
        metrics=ledger.metrics,
        seconds=time.perf_counter() - began,
        signal=signal,
        saved=saved,
        remark=verdict(run),
        diverged=world.broadcast(run.divergence.beyond_noise),
        passes=run.data.training.passes(run.batch_index),
    )


def _evaluated(run: Run, ledger: Ledger, stretch: PlannedStretch) -> Values:
    """Evaluate the weights and log the losses."""
    ledger.check()
    values = evaluate(run, stretch)
    run.companions.after_evaluation(values)
    ledger.flush(values)
    check_evaluation(run, values, stretch.recipe.name)
    return values


@contextmanager
def _keeping_what_is_whole(run: Run, ledger: Ledger) -> Iterator[None]:
    """Save the last state that is whole and finite where an error ends the steps."""
    try:
        yield
    except NonFiniteError as error:
        raise AgreedError(rescue(run, error)) from error
    except (AuditError, DivergedError):
        raise
    except Exception as error:
        keep_what_is_whole(run, ledger, error)
        raise


def train_step(run: Run, recipe: Recipe) -> Step:
    """One optimizer step on the batch of `run.step`, queued: the host waits for nothing. It is
    measured where that is due. One that fails leaves no trace in delayed scales.

    Where loss or gradients are not finite, the weights stay as they are.
    """
    config = run.config.train
    lr = learning_rate(run.config, run.step)
    values: Values = {
        "train/lr": lr,
        "train/tokens": (run.step + 1) * config.step_tokens,
        "precision/recipe": recipe.name,
    }
    if recipe.loss_scaling is not None:
        values["train/loss_scale"] = run.loss_scale.value
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    seed_model(run)
    scaling = run.scaling()
    try:
        with run.companions.around_step(recipe):
            queued = run.runner.step(recipe, step_rows(run))
    except Exception:
        if not run.mid_update:
            run.load_scaling(scaling)
            run.optimizer.zero_grad(set_to_none=True)
        raise
    step = Step(
        index=run.step,
        recipe=recipe,
        numbers=Numbers(queued.numbers),
        names=queued.names,
        values=values,
        scaling=scaling,
        loss_scale=run.loss_scale.value,
    )
    run.companions.after_step(step)
    return step


def enter_stretch(run: Run, previous: PlannedStretch | None) -> PlannedStretch:
    """The stretch of the coming step. Where one begins, its plan is applied to the model; a change
    is logged.
    """
    stretch = run.course.plan.at(run.step)
    if stretch is previous:
        return stretch
    run.apply(stretch)
    begin_loss_scale(run, stretch.recipe)
    if previous is None or (stretch.recipe, stretch.reason) != (previous.recipe, previous.reason):
        if previous is not None:  # the plan that was just printed says it for the start
            _log.info("step %d: %s (%s)", run.step, stretch.recipe.name, stretch.reason)
        run.record.tracker.log_event(
            run.step, "recipe", {"recipe": stretch.recipe.name, "reason": stretch.reason}
        )
    return stretch
