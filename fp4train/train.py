"""The training loop. An optimizer step is `train_step`; what surrounds it is in `train`, in the order it happens."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train.checkpoint import CheckpointError
from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.measure.probe import probe
from fp4train.precision import GEMMS, Recipe, autocast
from fp4train.precision.plan import PlannedStretch
from fp4train.precision.recipe import SMALLEST_LOSS_SCALE
from fp4train.quantize.random import MEASUREMENT, RandomKey
from fp4train.run.build import cancel_swap, swap_recipe
from fp4train.run.guard import NonFiniteError, finite_weights, first_non_finite_gradient, first_non_finite_output
from fp4train.run.host import CollectorBetweenSteps
from fp4train.run.progress import Progress
from fp4train.run.run import Run
from fp4train.run.signals import stop_on_signals
from fp4train.run.swaps import take_requests

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
    """Train from `run.step` to the end of the configured steps, or until SIGTERM or SIGINT.

    Raises:
        UserError: loss or gradient became NaN or infinite; a checkpoint from before that step is written first.
    """
    config, steps, began = run.config, run.config.train.steps, time.perf_counter()
    metrics: dict[str, float | str] = {}
    stretch, saved, kept = None, True, run.step
    shown = Progress(run.step, steps, config.train.tokens, run.peak_tokens_per_s())
    with stop_on_signals() as stop, CollectorBetweenSteps() as collector, shown as progress:
        while run.step < steps and stop.signal is None:
            pick_up_swaps(run)
            stretch = enter_stretch(run, stretch)
            recipe = stretch.recipe
            scaling = run.scaling()
            measured = config.eval.errors_every and (run.step + 1) % config.eval.errors_every == 0
            try:
                values = measured_step(run, recipe) if measured else train_step(run, recipe)
            except NonFiniteError as error:
                run.load_scaling(scaling)
                raise UserError(rescue(run, error)) from error
            run.step += 1
            values |= progress.advance(float(values["train/loss"]), recipe.name)
            if due(run.step, config.eval.every, steps):
                values |= evaluate(run, recipe)
            run.tracker.log(run.step, values)
            metrics |= values
            if due(run.step, config.checkpoint.every, steps):
                saved, kept = save(run), run.step
            collector.after(run.step)
            progress.resume_timing()
        if run.step != kept:
            saved = save(run)
    return Result(step=run.step, metrics=metrics, seconds=time.perf_counter() - began, signal=stop.signal, saved=saved)


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps (0: never) and at the end is due after `step` steps."""
    return step == steps or (every > 0 and step % every == 0)


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
    for request in take_requests(run.directory):
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
                swap_recipe(run, at, body["recipe"], name)
                event, text, values = "swap", f"recipe {name} from step {at} on", {"recipe": name, "at": at}
        except UserError as error:
            _log.error("swap%s refused: %s", f" to {name}" if name else "", error)
            run.tracker.log_event(run.step + 1, "swap refused", {"recipe": name, "reason": str(error)})
            request.answer(False, str(error))
        else:
            _log.warning("swap: %s", text)
            run.tracker.log_event(run.step + 1, event, values)
            request.answer(True, text)


def rescue(run: Run, error: NonFiniteError) -> str:
    """Save what was before the step that failed, and say what can be done."""
    run.tracker.log_event(run.step + 1, "non-finite", {"message": str(error)})
    last = "The weights are not finite themselves; the last checkpoint is from before"
    if finite_weights(run.model):
        last = "A checkpoint from before this step is saved" if save(run) else "No checkpoint could be written"
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


def save(run: Run) -> bool:
    """Write a checkpoint; a full disk costs the checkpoint, not the run."""
    try:
        run.save()
    except CheckpointError as error:
        _log.error("%s Training goes on.", error)
        run.tracker.log_event(run.step + 1, "checkpoint failed", {"reason": str(error)})
        return False
    return True
