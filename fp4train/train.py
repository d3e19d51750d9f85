"""The training loop. An optimizer step is `train_step`; what surrounds it is in `train`, in the order it happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train.errors import UserError
from fp4train.measure.probe import probe
from fp4train.optim.gate import step_unless
from fp4train.precision import GEMMS, Recipe, autocast
from fp4train.precision.plan import PlannedStretch
from fp4train.quantize.random import MEASUREMENT, RandomKey
from fp4train.run.change import pick_up_swaps
from fp4train.run.guard import NonFiniteError, check_evaluation, first_non_finite_output
from fp4train.run.host import CollectorBetweenSteps
from fp4train.run.ledger import Ledger, Numbers, Step, Values
from fp4train.run.progress import Progress
from fp4train.run.rescue import keep_what_is_whole, report, rescue, save, save_at_end
from fp4train.run.run import Run
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
    metrics: Values
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
            ledger = Ledger(run, progress, watch, blame)
            try:
                while run.step < steps and stop.signal is None and watch.trouble is None:
                    watchdog.set()
                    pick_up_swaps(run)
                    stretch = enter_stretch(run, stretch)
                    step = step_or_restore(run, stretch.recipe)
                    run.step, run.torn = run.step + 1, False
                    ledger.add(step)
                    evaluating = due(run.step, config.eval.every, steps)
                    if evaluating:
                        ledger.check()
                        values = evaluate(run, stretch.recipe)
                        ledger.settle(values)
                        check_evaluation(run.model, run.step, values, stretch.recipe.name)
                    report(run)
                    saving = due(run.step, config.checkpoint.every, steps) or run.saver.due(run.step)
                    if saving:
                        ledger.settle()
                        save(run, proven=evaluating)
                    collector.after(run.step)
                    if evaluating or saving:
                        progress.resume_timing()
                ledger.settle()
                saved = run.step == started or save_at_end(run, watch)
            except NonFiniteError as error:
                raise UserError(rescue(run, error)) from error
            except Exception as error:
                keep_what_is_whole(run, ledger, watch, error)
                raise
            if watch.look() is not None:
                raise UserError(f"{watch.trouble}; the run ended after step {run.step}")
    finally:
        run.feed.close()
        run.saver.close()
    return Result(
        step=run.step, metrics=ledger.metrics, seconds=time.perf_counter() - began, signal=stop.signal, saved=saved
    )


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps (0: never) and at the end is due after `step` steps."""
    return step == steps or (every > 0 and step % every == 0)


def step_or_restore(run: Run, recipe: Recipe) -> Step:
    """One step, measured where that is due; one that fails leaves no trace in delayed scales."""
    every, scaling = run.config.eval.errors_every, run.scaling()
    try:
        step = measured_step(run, recipe) if every and (run.step + 1) % every == 0 else train_step(run, recipe)
    except Exception:
        if not run.torn:
            run.load_scaling(scaling)
            run.optimizer.zero_grad(set_to_none=True)
        raise
    step.scaling = scaling
    return step


def train_step(run: Run, recipe: Recipe) -> Step:
    """One optimizer step on the batch of `run.step`, queued: the host waits for nothing.

    Where loss or gradients are not finite, the weights stay as they are.
    """
    config, optim = run.config.train, run.config.optim
    loss = forward_and_backward(run, recipe)
    trained = {name: p for name, p in run.model.named_parameters() if p.grad is not None}
    gradients = [p.grad for p in trained.values() if p.grad is not None]
    if run.loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / run.loss_scale)
    norms = torch.stack(torch._foreach_norm(gradients))
    norm = torch.linalg.vector_norm(norms)
    failed = ~(loss.isfinite() & norm.isfinite())
    run.failed = failed if run.failed is None else failed | run.failed
    if optim.clip is not None:
        torch.nn.utils.clip_grads_with_norm_(trained.values(), optim.clip, norm)
    lr = optim.lr * run.config.schedule.factor(run.step, config.steps)
    values: Values = {
        "train/lr": lr,
        "train/tokens": (run.step + 1) * config.tokens,
        "precision/recipe": recipe.name,
    }
    if recipe.loss_scaling is not None:
        values["train/loss_scale"] = run.loss_scale
    run.torn = True
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    step_unless(run.optimizer, run.failed)
    run.optimizer.zero_grad(set_to_none=True)
    return Step(
        index=run.step,
        recipe=recipe,
        numbers=Numbers(torch.cat((torch.stack((loss, norm)), norms))),
        names=list(trained),
        values=values,
        loss_scale=run.loss_scale,
    )


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


def measured_step(run: Run, recipe: Recipe) -> Step:
    """`train_step`, and before it a pass that measures what quantising costs each operand of each layer in it."""
    key = RandomKey(seed=run.config.run.seed, step=run.step, layer=0, operand=MEASUREMENT)
    scaling = run.scaling()
    with run.eagerly(), probe((module.layer, module) for module in run.linears()) as seen:
        forward_and_backward(run, recipe)
    run.optimizer.zero_grad(set_to_none=True)
    run.load_scaling(scaling)
    errors = seen.measure(run.plan.at(run.step).layers, key=key)
    step = train_step(run, recipe)
    step.values |= errors
    return step


def losses(run: Run, recipe: Recipe) -> Iterator[Tensor]:
    """The mean loss of each microbatch of the current step."""
    config = run.config.train
    rows, begin = config.microbatch or config.batch_size, run.step * config.batch_size
    for first in range(0, config.batch_size, rows):
        at = begin + first
        batch = run.feed.rows(at, rows, then=at + rows)
        yield forward(run, recipe, *batch, token_offset=first * config.seq_len)


def blame(run: Run, recipe: Recipe) -> str:
    """What is not finite first in the step that `run.step` is at."""
    run.apply(run.plan.at(run.step))
    with run.eagerly():
        return first_non_finite_output(run.model, losses(run, recipe))


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
    high, in_recipe = validation_losses(run, recipe)
    _log.info("step %d: validation loss %.4f, in the recipe %.4f", run.step, high, in_recipe)
    return {"val/loss": high, "val/loss_recipe": in_recipe}


def validation_losses(run: Run, recipe: Recipe) -> tuple[float, float]:
    """Mean losses of the validation batches in nats per token: in high precision, and in `recipe`."""
    batches = min(run.config.eval.batches, max(1, run.val_data.batches_per_epoch))
    rows = run.config.train.microbatch or run.config.train.batch_size
    starts = range(0, batches * run.config.train.batch_size, rows)
    high = recipe.with_high_precision(*GEMMS) if recipe.quantised else recipe
    run.model.eval()
    with torch.no_grad():
        found = {
            each: sum(torch.stack([forward(run, each, *run.val_data.rows(first, rows)) for first in starts]).tolist())
            / len(starts)
            for each in dict.fromkeys((high, recipe))
        }
    run.model.train()
    return found[high], found[recipe]


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
