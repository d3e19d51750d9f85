"""The training loop. An optimizer step is `train_step`; what surrounds it is in `train`, in the order it happens."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4train.measure.probe import probe
from fp4train.parallel.agree import Word, agree
from fp4train.parallel.apply import join_scales, synchronise
from fp4train.parallel.norm import clip, local, total_norm
from fp4train.parallel.world import AgreedError
from fp4train.precision import GEMMS, Recipe, autocast
from fp4train.precision.plan import PlannedStretch
from fp4train.precision.recipe import SMALLEST_LOSS_SCALE
from fp4train.quantize.random import MEASUREMENT, RandomKey
from fp4train.run.change import follow_swaps, pick_up_swaps
from fp4train.run.ending import keep_what_is_whole, refuse, report, rescue, save, save_at_end
from fp4train.run.guard import (
    LOSS_ITSELF,
    NORM_ITSELF,
    NonFiniteError,
    first_non_finite,
    first_non_finite_gradient,
    first_non_finite_output,
)
from fp4train.run.host import CollectorBetweenSteps
from fp4train.run.progress import Progress
from fp4train.run.run import Run
from fp4train.run.signals import stop_on_signals
from fp4train.run.watch import Watch, alarm

_log = logging.getLogger(__name__)

RANK_SPREAD = 0x9E3779B97F4A7C15
"""Between the dropout seeds of two ranks: far more than there are steps."""


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
    stretch, saved, world = None, True, run.world
    shown = Progress(run.step, steps, config.train.tokens, run.peak_tokens_per_s())
    started = run.step
    try:
        with (
            stop_on_signals(quietly=not world.lead) as stop,
            CollectorBetweenSteps() as collector,
            shown as progress,
            Watch(run) as watch,
            alarm(config.train.step_timeout) as watchdog,
        ):
            try:
                while True:
                    watchdog.set()
                    word = agree(world, stop.signal, news(run, watch) if world.lead else {})
                    stop.signal = word.signal
                    act(run, word)
                    if run.step >= steps or stop.signal is not None or "trouble" in word.lead:
                        break
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
                    if due(run.step, config.checkpoint.every, steps):
                        save(run, proven=evaluated)
                    collector.after(run.step)
                    progress.resume_timing()
                saved = run.step == started or save_at_end(run, watch)
            except NonFiniteError as error:
                raise AgreedError(rescue(run, error)) from error
            except Exception as error:
                keep_what_is_whole(run, watch, error)
                raise
            if trouble := world.of_lead(watch.look()):
                raise AgreedError(f"{trouble}; the run ended after step {run.step}")
    finally:
        run.saver.close()
    return Result(step=run.step, metrics=metrics, seconds=time.perf_counter() - began, signal=stop.signal, saved=saved)


def news(run: Run, watch: Watch) -> dict[str, Any]:
    """What every rank must act on before the next step; only what there is."""
    found: dict[str, Any] = {}
    bad = report(run)
    if bad is not None:
        found["bad"] = bad
    if watch.trouble is not None:
        found["trouble"] = watch.trouble
    elif run.step < run.config.train.steps and pick_up_swaps(run):
        found["swaps"] = run.swaps
    if run.saver.due(run.step):
        found["save"] = True
    return found


def act(run: Run, word: Word) -> None:
    """Do what the lead's news ask of every rank.

    Raises:
        NonFiniteError: a checkpoint was not written because weights or moments are not finite.
    """
    if "bad" in word.lead:
        refuse(word.lead["bad"])
    if "swaps" in word.lead and not run.world.lead:
        follow_swaps(run, word.lead["swaps"])
    if "save" in word.lead:
        save(run)


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
    world = run.world
    mean_loss = float(forward_and_backward(run, recipe))
    if not math.isfinite(mean_loss):
        with run.eagerly():
            where = first_non_finite_output(run.model, losses(run, recipe), cut=world.size > 1)
        raise NonFiniteError(run.step, "loss", mean_loss, world.first(where) or LOSS_ITSELF, recipe.name)

    gradients = [local(p.grad) for p in run.model.parameters() if p.grad is not None]
    if run.loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / run.loss_scale)
    norm = total_norm(gradients, world)
    grad_norm, scaling = float(norm), recipe.loss_scaling
    if not math.isfinite(grad_norm) and (scaling is None or run.loss_scale <= SMALLEST_LOSS_SCALE):
        where = world.first(first_non_finite_gradient(run.model)) or NORM_ITSELF
        raise NonFiniteError(run.step, "gradient norm", grad_norm, where, recipe.name)
    if optim.clip is not None:
        clip(gradients, optim.clip, norm)
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
    # A model's own random numbers (dropout) depend on the step and the rank's part of the batch alone, so that a
    # resumed run draws the same ones.
    torch.manual_seed((run.config.run.seed * 1_000_003 + run.step + run.world.data_rank * RANK_SPREAD) % 2**63)
    total, share = torch.zeros((), device=run.device), run.rows / run.config.train.batch_size
    for number, loss in enumerate(losses(run, recipe), 1):
        synchronise(run.model, last=number * run.rows == run.share)
        (loss * (run.loss_scale * share)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * share
    join_scales(run.model, run.world)
    return run.world.summed(total)


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
    """The mean loss of each microbatch of this rank's share of the current step's batch."""
    config, begin = run.config.train, run.world.data_rank * run.share
    for first in range(begin, begin + run.share, run.rows):
        batch = run.train_data.rows(run.step * config.batch_size + first, run.rows)
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
    starts = range(0, batches * run.config.train.batch_size, run.rows)
    high = recipe.with_high_precision(*GEMMS) if recipe.quantised else recipe
    run.model.eval()
    with torch.no_grad():
        found = {each: mean_loss(run, each, starts) for each in dict.fromkeys((high, recipe))}
    run.model.train()
    _log.info("step %d: validation loss %.4f, in the recipe %.4f", run.step, found[high], found[recipe])
    return {"val/loss": found[high], "val/loss_recipe": found[recipe]}


def mean_loss(run: Run, recipe: Recipe, starts: Sequence[int]) -> float:
    """The mean loss of the validation batches that begin at `starts`, each computed by one rank.

    Summed in one order by every rank, so that it does not depend on how many there are.
    """
    found = torch.zeros(len(starts), dtype=torch.float64, device=run.device)
    for number in range(run.world.data_rank, len(starts), run.world.data_ranks):
        found[number] = forward(run, recipe, *run.val_data.rows(starts[number], run.rows))
    each: list[float] = run.world.summed(found).tolist()
    return sum(each) / len(each)


def check_evaluation(run: Run, values: Mapping[str, float | str], recipe: Recipe) -> None:
    """Raises NonFiniteError where a validation loss is not finite."""
    for key, what in (("val/loss", "the validation loss"), ("val/loss_recipe", "the validation loss in the recipe")):
        if not math.isfinite(value := float(values[key])):
            named = {f"weight {name}": p for name, p in run.model.named_parameters()}
            bad = run.world.first(first_non_finite(named))
            where = bad or "no weight: the evaluation itself"
            raise NonFiniteError(run.step, what, value, where, recipe.name, of_state=True)


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
