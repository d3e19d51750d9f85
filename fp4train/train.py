"""The training loop. An optimizer step is `train_step`; what surrounds it is in `train`, in the order it happens."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train import checkpoint
from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.measure.probe import probe
from fp4train.precision import GEMMS, Recipe, autocast
from fp4train.precision.plan import PlannedStretch
from fp4train.precision.recipe import SMALLEST_LOSS_SCALE
from fp4train.quantize.random import MEASUREMENT, RandomKey
from fp4train.run.change import cancel_swap, swap_recipe
from fp4train.run.directory import CHECKPOINTS
from fp4train.run.guard import (
    NonFiniteError,
    finite_weights,
    first_non_finite,
    first_non_finite_gradient,
    first_non_finite_output,
)
from fp4train.run.host import CollectorBetweenSteps
from fp4train.run.progress import Progress
from fp4train.run.run import Run
from fp4train.run.saving import PAUSES
from fp4train.run.signals import stop_on_signals
from fp4train.run.watch import Watch, alarm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended.

    Args:
        step: optimizer steps done.
        metrics: the last value of every logged key.
        seconds: spent in the loop.
        signal: the one that ended it early, or None.
        saved: whether the last checkpoint could be written.
    """

    step: int
    metrics: dict[str, float | str]
    seconds: float
    signal: int | None
    saved: bool


def train(run: Run) -> Result:
    """Train from `run.step` to the end of the configured steps, or until a signal asks it to end.

    However it ends, the last state that is whole and finite is saved first.

    Raises:
        UserError: a loss, gradient, weight or moment became NaN or infinite; or the run's directory went away.
        Exception: whatever a step raised.
    """
    config, steps, began = run.config, run.config.train.steps, time.perf_counter()
    metrics: dict[str, float | str] = {}
    stretch, saved = None, True
    shown = Progress(run.step, steps, config.train.tokens, run.peak_tokens_per_s())
    started = run.step
    try:
        with (
            stop_on_signals() as stop,
            CollectorBetweenSteps() as collector,
            shown as progress,
            Watch(run) as watch,
            alarm(config.train.step_timeout) as watchdog,
        ):
            try:
                while run.step < steps and stop.signal is None and watch.trouble is None:
                    watchdog.set()
                    pick_up_swaps(run)
                    stretch = enter_stretch(run, stretch)
                    recipe = stretch.recipe
                    values = step_or_restore(run, recipe)
                    run.step, run.torn = run.step + 1, False
                    run.saver.prove(run.step - 1)
                    values |= progress.advance(float(values["train/loss"]), recipe.name)
                    watch.loss = float(values["train/loss"])
                    if evaluated := due(run.step, config.eval.every, steps):
                        values |= evaluate(run, recipe)
                    run.tracker.log(run.step, values)
                    metrics |= values
                    if evaluated:
                        check_evaluation(run, values, recipe)
                    report(run)
                    if due(run.step, config.checkpoint.every, steps) or run.saver.due(run.step):
                        save(run, proven=evaluated)
                    collector.after(run.step)
                    progress.resume_timing()
                saved = run.step == started or save_at_end(run, watch)
            except NonFiniteError as error:
                raise UserError(rescue(run, error)) from error
            except Exception as error:
                keep_what_is_whole(run, watch, error)
                raise
            if watch.look() is not None:
                raise UserError(f"{watch.trouble}; the run ended after step {run.step}")
    finally:
        run.saver.close()
    return Result(step=run.step, metrics=metrics, seconds=time.perf_counter() - began, signal=stop.signal, saved=saved)


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps (0: never) and at the end is due after `step` steps."""
    return step == steps or (every > 0 and step % every == 0)


def step_or_restore(run: Run, recipe: Recipe) -> dict[str, float | str]:
    """One step, measured where that is due; one that fails leaves no trace in delayed scales."""
    every, scaling = run.config.eval.errors_every, run.scaling()
    try:
        return measured_step(run, recipe) if every and (run.step + 1) % every == 0 else train_step(run, recipe)
    except Exception:
        if not run.torn:
            run.load_scaling(scaling)
            run.optimizer.zero_grad(set_to_none=True)
        raise


def train_step(run: Run, recipe: Recipe) -> dict[str, float | str]:
    """One optimizer step on the batch of `run.step`; returns what is logged of it.

    Raises:
        NonFiniteError: the loss, or a gradient that no smaller loss scale can mend, is not finite. Weights are as
            before the step.
    """
    config, optim = run.config.train, run.config.optim
    mean_loss = float(forward_and_backward(run, recipe))
    if not math.isfinite(mean_loss):
        with run.eagerly():
            where = first_non_finite_output(run.model, losses(run, recipe))
        raise NonFiniteError(run.step, "loss", mean_loss, where, recipe.name)

    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if run.loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / run.loss_scale)
    norm = torch.nn.utils.get_total_norm(gradients)
    grad_norm, scaling = float(norm), recipe.loss_scaling
    if not math.isfinite(grad_norm) and (scaling is None or run.loss_scale <= SMALLEST_LOSS_SCALE):
        raise NonFiniteError(run.step, "gradient norm", grad_norm, first_non_finite_gradient(run.model), recipe.name)
    if optim.clip is not None:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), optim.clip, norm)
    lr = optim.lr * run.config.schedule.factor(run.step, config.steps)
    values: dict[str, float | str] = {
        "train/loss": mean_loss,
        "train/grad_norm": grad_norm,
        "train/lr": lr,
        "train/tokens": (run.step + 1) * config.tokens,
        "precision/recipe": recipe.name,
    }
    run.torn = True
    if scaling is not None:
        values["train/loss_scale"] = run.loss_scale
        run.loss_scale, run.good_steps = scaling.update(run.loss_scale, run.good_steps, math.isfinite(grad_norm))
    if math.isfinite(grad_norm):
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return values


def forward_and_backward(run: Run, recipe: Recipe) -> Tensor:
    """Gradients of the current step's batch, times the loss scale, added to the parameters'; the mean loss."""
    # A model's own random numbers (dropout) depend on the step alone, so that a resumed run draws the same ones.
    torch.manual_seed((run.config.run.seed * 1_000_003 + run.step) % 2**63)
    config, total = run.config.train, torch.zeros((), device=run.device)
    share = (config.microbatch or config.batch_size) / config.batch_size
    for loss in losses(run, recipe):
        (loss * (run.loss_scale * share)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * share
    return total


def measured_step(run: Run, recipe: Recipe) -> dict[str, float | str]:
    """`train_step`, and before it a pass that measures what quantising costs each operand of each layer in it."""
    key = RandomKey(seed=run.config.run.seed, step=run.step, layer=0, operand=MEASUREMENT)
    scaling = run.scaling()
    with run.eagerly(), probe((module.layer, module) for module in run.linears()) as seen:
        forward_and_backward(run, recipe)
    run.optimizer.zero_grad(set_to_none=True)
    run.load_scaling(scaling)
    errors = seen.measure(run.plan.at(run.step).layers, key=key)
    return train_step(run, recipe) | errors


def losses(run: Run, recipe: Recipe) -> Iterator[Tensor]:
    """The mean loss of each microbatch of the current step."""
    config = run.config.train
    rows = config.microbatch or config.batch_size
    for first in range(0, config.batch_size, rows):
        batch = run.train_data.rows(run.step * config.batch_size + first, rows)
        yield forward(run, recipe, *batch, token_offset=first * config.seq_len)


def forward(run: Run, recipe: Recipe, tokens_BT: Tensor, targets_BT: Tensor, *, token_offset: int = 0) -> Tensor:
    """The loss of one microbatch in `recipe`, in nats a token."""
    context = autocast(
        recipe, policy=run.config.policy, seed=run.config.run.seed, step=run.step, token_offset=token_offset
    )
    with context, run.region():
        loss: Tensor = run.model(tokens_BT.to(run.device), targets_BT.to(run.device))
    return loss


def evaluate(run: Run, recipe: Recipe) -> dict[str, float | str]:
    """Validation loss in high precision and, beside it, in the recipe."""
    batches = min(run.config.eval.batches, max(1, run.val_data.batches_per_epoch))
    rows = run.config.train.microbatch or run.config.train.batch_size
    starts = range(0, batches * run.config.train.batch_size, rows)
    high = recipe.with_high_precision(*GEMMS) if recipe.quantised else recipe
    run.model.eval()
    with torch.no_grad():
        found = {
            each: sum(float(forward(run, each, *run.val_data.rows(first, rows))) for first in starts) / len(starts)
            for each in dict.fromkeys((high, recipe))
        }
    run.model.train()
    _log.info("step %d: validation loss %.4f, in the recipe %.4f", run.step, found[high], found[recipe])
    return {"val/loss": found[high], "val/loss_recipe": found[recipe]}


def pick_up_swaps(run: Run) -> None:
    """Carry out what `fp4train swap` asked for since the last step; refuse what is impossible; answer either way."""
    for request in run.inbox.take(run.swaps):
        body = request.body or {}
        name = str(body.get("name", ""))
        try:
            if request.body is None:
                raise UserError(request.problem)
            if "cancel" in body:
                at = bind(body["cancel"], int, "cancel")
                cancel_swap(run, at)
                event, text, values = "swap cancelled", f"the swap at step {at} is cancelled", {"at": at}
            else:
                at = run.step if body["at"] is None else body["at"]
                swap_recipe(run, at, body["recipe"], name, request.id)
                event, text, values = "swap", f"recipe {name} from step {at} on", {"recipe": name, "at": at}
        except UserError as error:
            _log.error("swap%s refused: %s", f" to {name}" if name else "", error)
            refused = {"recipe": name, "reason": str(error), "request": request.id}
            run.tracker.log_event(run.step + 1, "swap refused", refused)
            request.answer(False, str(error))
        else:
            values["request"] = request.id
            _log.warning("swap: %s", text)
            run.tracker.log_event(run.step + 1, event, values)
            request.answer(True, text)


def check_evaluation(run: Run, values: Mapping[str, float | str], recipe: Recipe) -> None:
    """Raises NonFiniteError where a validation loss is not finite."""
    for key, what in (("val/loss", "the validation loss"), ("val/loss_recipe", "the validation loss in the recipe")):
        if not math.isfinite(value := float(values[key])):
            bad = first_non_finite({f"weight {name}": p for name, p in run.model.named_parameters()})
            where = bad or "no weight: the evaluation itself"
            raise NonFiniteError(run.step, what, value, where, recipe.name, of_state=True)


def rescue(run: Run, error: NonFiniteError) -> str:
    """Save what was before the step that failed, and say what can be done."""
    run.tracker.log_event(run.step + 1, "non-finite", {"message": str(error)})
    if run.torn or not finite_weights(run.model) or error.of_state:
        run.saver.wait()
        report(run, quietly=True)
        there = steps_saved(run)
        last = "The weights are not finite themselves" if not finite_weights(run.model) else "This state is not saved"
        last += f"; the last checkpoint is from before, step {there[-1]}" if there else "; there is no checkpoint"
    elif save_and_wait(run):
        before = [step for step in steps_saved(run) if step < run.step]
        last = "A checkpoint from before this step is saved"
        last += f", the one of step {before[-1]} is kept (resume_step={before[-1]})" if before else ""
    else:
        last = "No checkpoint could be written"
    return (
        f"{error}. {last}. Go on with another recipe, more layers in high precision (policy.last) or a lower rate: "
        f"resume={run.directory} recipe=… optim.lr=…"
    )


def enter_stretch(run: Run, before: PlannedStretch | None) -> PlannedStretch:
    """The stretch of the coming step. Where one begins, its plan is applied to the model; a change is logged."""
    stretch = run.plan.at(run.step)
    if stretch is before:
        return stretch
    run.apply(stretch)
    if before is None or stretch.recipe != before.recipe:
        if before is not None:  # the plan that was just printed says it for the start
            _log.info("step %d: %s (%s)", run.step, stretch.recipe.name, stretch.reason)
        run.tracker.log_event(run.step + 1, "recipe", {"recipe": stretch.recipe.name, "reason": stretch.reason})
    return stretch


def save(run: Run, *, proven: bool = False) -> None:
    """Begin a checkpoint, which is written while the next steps run."""
    run.saver.begin(proven=proven)


def report(run: Run, *, quietly: bool = False) -> None:
    """Say which checkpoints could not be written: that costs the checkpoint, not the run.

    Raises:
        NonFiniteError: one was not written because weights or moments are not finite; not with `quietly`.
    """
    for outcome in run.saver.outcomes():
        if outcome.problem is not None:
            _log.error("%s Training goes on; it is tried again.", outcome.problem)
            run.tracker.log_event(run.step + 1, "checkpoint failed", {"reason": outcome.problem})
        elif outcome.bad is not None and not quietly:
            raise NonFiniteError(
                outcome.step, "a tensor of the checkpoint", math.nan, outcome.bad, "its state", of_state=True
            )


def save_and_wait(run: Run, *, proven: bool = False) -> bool:
    """Have the state of this step written, now, and if it fails a few times more; whether it is."""
    for pause in (*PAUSES, None):
        if not run.saver.holds(run.step):
            save(run, proven=proven)
        run.saver.wait()
        report(run)
        if run.saver.saved == run.step:
            return True
        if pause is not None:
            time.sleep(pause)
    return False


def save_at_end(run: Run, watch: Watch) -> bool:
    """The last checkpoint of a run; whether it is written."""
    if watch.look() is not None and watch.lost:
        _log.error("%s; nothing is saved there", watch.trouble)
        return False
    return save_and_wait(run)


def keep_what_is_whole(run: Run, watch: Watch, error: Exception) -> None:
    """Save what can be saved when something went wrong, and say what is there."""
    if run.torn or (watch.look() is not None and watch.lost):
        _log.error("step %d was interrupted while the weights were updated; they are not saved", run.step)
    else:
        try:
            run.tracker.log_event(run.step + 1, "error", {"message": f"{type(error).__name__}: {error}"})
            saved = finite_weights(run.model) and save_and_wait(run)
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
