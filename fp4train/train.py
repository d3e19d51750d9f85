"""The training loop. An optimizer step is `train_step`; what surrounds it is in `train`, in the order it happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4train.measure.statistics import watch as watch_operands
from fp4train.optim.gate import step_unless
from fp4train.parallel import pipeline
from fp4train.parallel.agree import Word, agree
from fp4train.parallel.apply import join_scales
from fp4train.parallel.norm import clip, gradient_norms
from fp4train.parallel.tensor import copies
from fp4train.parallel.world import AgreedError
from fp4train.precision import GEMMS, Recipe
from fp4train.precision.plan import PlannedStretch
from fp4train.quantize.random import MEASUREMENT, RandomKey
from fp4train.run.batches import microbatch, microbatches, step_rows
from fp4train.run.host import CollectorBetweenSteps, peak_memory
from fp4train.run.oscillation import reset_oscillating
from fp4train.run.record.change import follow_swaps, pick_up_swaps
from fp4train.run.run import Run
from fp4train.run.statistics import Pending, log_statistics
from fp4train.run.step_graph import Queued, Rows, copy_of
from fp4train.run.supervise.divergence import DivergedError, act_on, answer, follow, verdict
from fp4train.run.supervise.guard import NonFiniteError, check_evaluation, first_non_finite_output
from fp4train.run.supervise.ledger import Ledger, Numbers, Step, Values
from fp4train.run.supervise.progress import Progress
from fp4train.run.supervise.rescue import keep_what_is_whole, refuse, report, rescue, save, save_at_end
from fp4train.run.supervise.signals import stop_on_signals
from fp4train.run.supervise.watch import Watch, alarm
from fp4train.shards import local

_log = logging.getLogger(__name__)

RANK_SPREAD = 0x9E3779B97F4A7C15
"""Between the dropout seeds of two data ranks: far more than there are steps."""
STAGE_SPREAD = 0xD1B54A32D192ED03
"""Between those of two stages of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended.

    Args:
        step: optimizer steps done.
        metrics: the last value of every logged key.
        seconds: spent in the loop.
        signal: the one that ended it early, or None.
        saved: whether the last checkpoint could be written.
        diverged: what is said of a loss that ended far too high; None: it did not.
    """

    step: int
    metrics: Values
    seconds: float
    signal: int | None
    saved: bool
    diverged: str | None = None


def train(run: Run) -> Result:
    """Train from `run.step` to the end of the configured steps, or until a signal asks it to end.

    However it ends, the last state that is whole and finite is saved first.

    Raises:
        UserError: a loss, gradient, weight or moment became NaN or infinite; or the run's directory went away.
        DivergedError: the loss diverged, and the run is to end, or to go back to a checkpoint. Nothing is saved then.
        Exception: whatever a step raised.
    """
    config, steps, began = run.config, run.config.train.steps, time.perf_counter()
    stretch, saved, world = None, True, run.world
    shown = Progress(
        run.step, steps, config.train.tokens, run.peak_tokens_per_s(), ranks=world.size, quietly=not world.lead
    )
    started = run.step
    try:
        with (
            stop_on_signals(quietly=not world.lead) as stop,
            CollectorBetweenSteps() as collector,
            shown as progress,
            Watch(run) as watch,
            alarm(config.train.step_timeout) as watchdog,
        ):
            ledger = Ledger(run, progress, watch, blame, follow)
            try:
                while True:
                    watchdog.set()
                    word = agree(world, stop.signal, news(run, watch) if world.lead else {}, peak_memory(run.device))
                    act(run, ledger, word)
                    if run.step >= steps or word.signal is not None or "trouble" in word.lead:
                        break
                    stretch = enter_stretch(run, stretch)
                    step = step_or_restore(run, stretch.recipe)
                    run.step, run.torn = run.step + 1, False
                    step.values |= word.memory
                    ledger.add(step)
                    evaluating = due(run.step, config.eval.every, steps)
                    if evaluating:
                        ledger.check()
                        values = evaluate(run, stretch.recipe)
                        ledger.settle(values)
                        check_evaluation(run.model, run.step, values, stretch.recipe.name, world)
                    saving = due(run.step, config.checkpoint.every, steps)
                    if saving:
                        ledger.settle()
                        save(run, proven=evaluating)
                    collector.after(run.step)
                    if evaluating or saving:
                        progress.resume_timing()
                ledger.settle()
                saved = run.step == started or save_at_end(run, watch)
            except NonFiniteError as error:
                raise AgreedError(rescue(run, error)) from error
            except DivergedError:
                raise
            except Exception as error:
                keep_what_is_whole(run, ledger, watch, error)
                raise
            if trouble := world.of_lead(watch.look()):
                raise AgreedError(f"{trouble}; the run ended after step {run.step}")
            signal = world.largest_numbers(stop.signal or 0)[0] or None
    finally:
        run.feed.close()
        run.saver.close()
    return Result(
        step=run.step,
        metrics=ledger.metrics,
        seconds=time.perf_counter() - began,
        signal=signal,
        saved=saved,
        diverged=verdict(run),
    )


def news(run: Run, watch: Watch) -> dict[str, Any]:
    """What the lead found and every rank must act on before the next step; only what there is."""
    found: dict[str, Any] = {}
    if (bad := report(run)) is not None:
        found["bad"] = bad
    if watch.trouble is not None:
        found["trouble"] = watch.trouble
    elif run.step < run.config.train.steps and pick_up_swaps(run):
        found["swaps"] = run.swaps
    if run.saver.due(run.step):
        found["save"] = True
    if (diverged := answer(run)) is not None:
        found["diverged"] = diverged
    return found


def act(run: Run, ledger: Ledger, word: Word) -> None:
    """Do what the lead's news ask of every rank.

    Raises:
        NonFiniteError: a checkpoint was not written because weights or moments are not finite.
        DivergedError: the loss diverged, and more than a warning is wanted.
    """
    if not run.world.lead:
        run.saver.outcomes()  # the lead has told them
    if "bad" in word.lead:
        refuse(word.lead["bad"])
    if "diverged" in word.lead:
        act_on(run, word.lead["diverged"])
    if "swaps" in word.lead and not run.world.lead:
        follow_swaps(run, word.lead["swaps"])
    if "save" in word.lead:
        ledger.settle()
        save(run)


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps (0: never) and at the end is due after `step` steps."""
    return step == steps or (every > 0 and step % every == 0)


def step_or_restore(run: Run, recipe: Recipe) -> Step:
    """One step, measured where that is due; one that fails leaves no trace in delayed scales."""
    every, scaling = run.config.eval.errors_every, run.scaling()
    if run.graph is not None:
        scaling = copy_of(scaling)  # a recorded step writes into the tensors themselves
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
    lr = optim.lr * run.config.schedule.factor(run.step, config.steps)
    values: Values = {
        "train/lr": lr,
        "train/tokens": (run.step + 1) * config.tokens,
        "precision/recipe": recipe.name,
    }
    if recipe.loss_scaling is not None:
        values["train/loss_scale"] = run.loss_scale
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    seed_model(run)

    def work(rows: Iterable[Rows]) -> Queued:
        return queue_step(run, recipe, rows)

    queued = work(step_rows(run)) if run.graph is None else run.graph.step(step_rows(run), work)
    values |= reset_oscillating(run, queued.names)
    return Step(
        index=run.step,
        recipe=recipe,
        numbers=Numbers(queued.numbers),
        names=queued.names,
        values=values,
        loss_scale=run.loss_scale,
        norms=queued.norms,
    )


def queue_step(run: Run, recipe: Recipe, rows: Iterable[Rows]) -> Queued:
    """Forward, backward and optimizer on microbatches of `rows`.

    What is queued depends on the step only through device memory and `run.step`, as `step_graph.py` says.
    """
    optim = run.config.optim
    loss = forward_and_backward(run, recipe, rows)
    trained = {name: p for name, p in run.model.named_parameters() if p.grad is not None}
    gradients = [local(p.grad) for p in trained.values() if p.grad is not None]
    if run.loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / run.loss_scale)
    alike = None if run.world.tensor is None else [copies(p) for p in trained.values()]
    norm, norms = gradient_norms(gradients, run.world, alike)
    failed = ~(loss.isfinite() & norm.isfinite())
    run.failed = failed if run.failed is None else failed | run.failed
    if optim.clip is not None:
        clip(gradients, optim.clip, norm)
    run.torn = True
    step_unless(run.optimizer, run.failed)
    run.optimizer.zero_grad(set_to_none=True)
    return Queued(list(trained), torch.cat((torch.stack((loss, norm)), norms)), norms)


def seed_model(run: Run) -> None:
    """Seed a model's own random numbers (dropout): they depend on the step and the rank's part of batch and model
    alone, so that a resumed run draws the same ones."""
    place = run.world.data_rank * RANK_SPREAD + run.world.stage * STAGE_SPREAD
    torch.manual_seed((run.config.run.seed * 1_000_003 + run.step + place) % 2**63)


def forward_and_backward(run: Run, recipe: Recipe, rows: Iterable[Rows]) -> Tensor:
    """Gradients of microbatches of `rows`, times the loss scale, added to the parameters'; the mean loss."""
    total, share = torch.zeros((), device=run.device), run.rows / run.config.train.batch_size
    weight = run.loss_scale * share
    for loss in pipeline.train_losses(run.model, run.pipeline, microbatches(run, recipe, rows), weight):
        total += loss * share
    join_scales(run.model, run.world)
    return run.world.summed(total)


def measured_step(run: Run, recipe: Recipe) -> Step:
    """`train_step`, and statistics of each operand of each layer in it.

    Hooks sample the tensors of the step itself, whose numbers they do not change. In compiled blocks no hook would see
    them: there an eager pass before the step is measured.
    """
    layers, scaling = [(module.layer, module) for module in run.linears()], run.scaling()
    if run.config.train.compile:
        with run.eagerly(), watch_operands(layers) as watched:
            seed_model(run)
            forward_and_backward(run, recipe, step_rows(run))
        run.optimizer.zero_grad(set_to_none=True)
        run.load_scaling(scaling)
        step = train_step(run, recipe)
    else:
        with run.eagerly(), watch_operands(layers) as watched:
            step = train_step(run, recipe)
    assert step.norms is not None
    norms = run.world.summed_over_shards(step.norms.double().square()).sqrt()
    if run.world.lead:
        key = RandomKey(seed=run.config.run.seed, step=step.index, layer=0, operand=MEASUREMENT)
        pending = Pending.of(
            watched.measure(run.plan.at(step.index).layers, key),
            dict(zip(step.names, norms, strict=True)),
            tokens=run.config.train.tokens,
            loss_scale=step.loss_scale,
        )
        step.measured = lambda run: log_statistics(run, pending.read(step.index + 1, recipe.name))
    return step


def blame(run: Run, recipe: Recipe) -> str:
    """What is not finite first in the step that `run.step` is at."""
    run.apply(run.plan.at(run.step))
    with run.eagerly():
        passes = pipeline.losses(run.model, run.pipeline, microbatches(run, recipe, step_rows(run)))
        where = first_non_finite_output(run.model, passes, cut=run.world.size > 1)
    # Ranks that share a sum see what came from another one: the earliest module of the whole model is where it began.
    origin = run.world.least(where, lambda found: (found.what != "weight", run.place_of(found.module)))
    return str(origin or "the loss itself")


def evaluate(run: Run, recipe: Recipe) -> dict[str, float | str]:
    """Validation loss in high precision and, beside it, in the recipe."""
    high, in_recipe = validation_losses(run, recipe)
    _log.info("step %d: validation loss %.4f, in the recipe %.4f", run.step, high, in_recipe)
    return {"val/loss": high, "val/loss_recipe": in_recipe}


def validation_losses(run: Run, recipe: Recipe) -> tuple[float, float]:
    """Mean losses of the validation batches in nats per token: in high precision, and in `recipe`."""
    high, in_recipe = microbatch_losses(run, recipe)
    return sum(high) / len(high), sum(in_recipe) / len(in_recipe)


def microbatch_losses(run: Run, recipe: Recipe) -> tuple[list[float], list[float]]:
    """The loss of each microbatch of the validation batches, in high precision, and in `recipe`."""
    batches = min(run.config.eval.batches, max(1, run.val_data.batches_per_epoch))
    starts = range(0, batches * run.config.train.batch_size, run.rows)
    high = recipe.with_high_precision(*GEMMS) if recipe.quantised else recipe
    run.model.eval()
    with torch.no_grad():
        found = {each: _losses(run, each, starts) for each in dict.fromkeys((high, recipe))}
    run.model.train()
    return found[high], found[recipe]


def _losses(run: Run, recipe: Recipe, starts: Sequence[int]) -> list[float]:
    """The losses of the validation rows that begin at `starts`, each computed by one rank.

    In one order on every rank, so that their sum does not depend on how many there are.
    """
    found = torch.zeros(len(starts), device=run.device)
    own = range(run.world.data_rank, len(starts), run.world.mesh.data)
    rows = (microbatch(run, recipe, *run.val_data.rows(starts[number], run.rows)) for number in own)
    for number, loss in zip(own, pipeline.losses(run.model, run.pipeline, rows), strict=False):
        found[number] = loss
    each: list[float] = run.world.summed(found).tolist()
    return each


def enter_stretch(run: Run, before: PlannedStretch | None) -> PlannedStretch:
    """The stretch of the coming step. Where one begins, its plan is applied to the model; a change is logged."""
    stretch = run.plan.at(run.step)
    if stretch is before:
        return stretch
    run.apply(stretch)
    if before is None or (stretch.recipe, stretch.reason) != (before.recipe, before.reason):
        if before is not None:  # the plan that was just printed says it for the start
            _log.info("step %d: %s (%s)", run.step, stretch.recipe.name, stretch.reason)
        run.tracker.log_event(run.step + 1, "recipe", {"recipe": stretch.recipe.name, "reason": stretch.reason})
    return stretch
