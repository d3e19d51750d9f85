"""Forks: short continuations of one checkpoint that differ in one thing, so that their losses can
be subtracted.

A fork goes on from the checkpoint's weights and optimizer state for a few steps, with the learning
rate falling to zero (`linear`) or by the run's own schedule (`own`), and is evaluated on the run's
validation batches. Its seed chooses the training batches and the random bits of stochastic
rounding. All candidates of a seed see the same batches in the same order, so what the batches do to
the loss cancels in their difference: whole runs of different recipes scatter by .01-.03 nats per
token, differences of forks by .0001-.001.

A fork is a `Run` like any other, trained by the same steps; it shares the model of the checkpoint
with the other forks and writes no file.

Forks are made one after another, or in several processes of which each has its own copy of the
model and the data. A process that ends takes no result with it: what it had finished was sent. When
the parent ends, however it ends, the connection closes, and its processes end after the fork that
they are at.
"""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Thread

import torch
from omegaconf import OmegaConf

from fp4train.companion import Companion
from fp4train.config import Config, plain
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device
from fp4train.lab.studies.base import Base, Branch, ForkRequest, ForkSettings
from fp4train.lab.studies.candidates import RecipeCandidate
from fp4train.lab.studies.subject import Subject, open_subject
from fp4train.optim.schedule import Schedule
from fp4train.precision import Timeline
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_plan, equip
from fp4train.run.companions import in_studies
from fp4train.run.evaluate import check_evaluation, microbatch_losses
from fp4train.run.find import Command
from fp4train.run.queued import Step, Values
from fp4train.run.record.directory import read_config, recipes_of, without_plugins
from fp4train.run.record.trust import check_paths, saved_with
from fp4train.run.run import Run
from fp4train.run.state.numbers import begin_loss_scale
from fp4train.run.supervise.guard import NonFiniteError
from fp4train.run.supervise.ledger import Ledger
from fp4train.run.timeline import Course, build_timeline
from fp4train.train import train_step


@dataclass(frozen=True, kw_only=True)
class Fork:
    """How one fork ended. Losses in nats per token; None where it diverged.

    Args:
        recipe, high: loss on the validation batches, in its recipe and in high precision.
        train: mean loss over its steps.
        parts: loss in its recipe of each pass over the validation batches, times its weight
            (`Passes.weight`): their mean is `recipe`.
        problem: step, number and layer at which the fork diverged; None where it did not.
        seconds: seconds that it took.
    """

    recipe: float | None
    high: float | None
    train: float | None
    problem: str | None
    seconds: float
    parts: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class ToZero(Schedule):
    """Linear from the factor `start` towards zero, which is reached one step after the last."""

    start: float = 1.0

    def cooldown_start(self, steps: int) -> int:
        return 0

    def factor(self, step: int, steps: int) -> float:
        return self.start * (1 - step / steps)


class KeptLosses(Companion):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.by_step: list[float] = []

    def on_numbers(self, run: Run, step: Step, values: Values) -> None:
        self.by_step.append(step.read()[0])


def open_checkpoint(
    source: Path,
    step: int,
    paths: Mapping[str, str | None] | None = None,
) -> Subject:
    """The checkpoint of step `step` of the run in `source`.

    Args:
        paths: full key → path, which the command line gives; the rest are those of the run's
            configuration.

    Raises:
        UserError: there is none, or it cannot be used; or see `check_paths`.
    """
    return open_subject(checkpoint_command(source, step, paths or {}), optimizer=True)


def checkpoint_command(source: Path, step: int, paths: Mapping[str, str | None]) -> Command:
    """The command with which `open_checkpoint` opens a checkpoint.

    Raises:
        UserError: see `check_paths`.
    """
    saved = plain(read_config(source))
    cfg = saved_with(without_plugins(OmegaConf.create(saved)), source, step, paths)
    check_paths(cfg, paths)
    with recipes_of(source, saved):
        return Command.of(cfg, saved)


def branch(subject: Subject, candidate: RecipeCandidate, settings: ForkSettings) -> Branch:
    """The candidate's recipe, policy and phases under the schedule of the forks.

    Under "linear" a fork counts its steps from 0 and is a cooldown as a whole; phases count from
    its beginning.

    Raises:
        UserError: a value that does not fit, a pattern that matches no layer, a backend that cannot
            run the recipe.
    """
    run = subject.run
    config, timeline = course_of(run.config, candidate, settings)
    with user_errors(UserError, before=f"{candidate.name}: "):
        plan = build_plan(config, find_layers(run.model), timeline, Device.of(run.device))
    start = subject.step if settings.schedule == "own" else 0
    last = [
        replace(s, stop=min(s.stop, start + settings.steps)) for s in plan.since(start).stretches
    ]
    plan = replace(plan, stretches=tuple(s for s in last if s.start < s.stop))
    return Branch(candidate=candidate, config=config, timeline=timeline, plan=plan)


def course_of(
    config: Config, candidate: RecipeCandidate, settings: ForkSettings
) -> tuple[Config, Timeline]:
    """The configuration of a candidate's forks, of that of the run, and their timeline.

    Raises:
        UserError: see `branch`.
    """
    config = candidate.applied(config)
    config = replace(config, eval=replace(config.eval, batches=settings.batches, errors_every=0))
    if settings.schedule == "linear":
        schedule = ToZero(warmup=0, start=settings.lr / config.optim.lr)
        train = replace(config.train, steps=settings.steps)
        config = replace(config, train=train, schedule=schedule)
    with user_errors(UserError, before=f"{candidate.name}: "):
        return config, build_timeline(config)


def fork_seed(seed: int, number: int) -> int:
    """The seed of fork `number` (from 0) of a run with the seed `seed`; never the run's own."""
    return (seed + 1_000_003 * (number + 1)) % 2**63


def begin(subject: Subject, branch: Branch, settings: ForkSettings, number: int) -> Run:
    """Fork `number` of a candidate, standing at the checkpoint. There is one at a time: they share
    the model.
    """
    assert subject.start is not None
    config = replace(
        branch.config,
        run=replace(branch.config.run, seed=fork_seed(subject.run.config.run.seed, number)),
    )
    run = replace(
        subject.run,
        config=config,
        data=subject.run.data.with_seed(config.run.seed),
        course=Course(branch.timeline, branch.plan),
        mid_update=False,
        failed=None,
    )
    equip(run)
    # read anew: the optimizer takes the moments themselves, and a fork changes them
    run.restore(subject.start)
    if settings.schedule == "linear":
        run.step = 0
    return run


def fork(subject: Subject, branch: Branch, settings: ForkSettings, number: int) -> Fork:
    """Train and evaluate fork `number` of a candidate."""
    began = time.perf_counter()
    run = begin(subject, branch, settings, number)
    stretch = None
    parts: list[float] = []
    losses = KeptLosses()
    run.companions = in_studies(run, [*run.states, losses])
    ledger = Ledger(run)
    problem = None
    try:
        for _ in range(settings.steps):
            if (now := run.course.plan.at(run.step)) is not stretch:
                stretch = now
                run.apply(stretch)
                begin_loss_scale(run, stretch.recipe)
            step = train_step(run, stretch.recipe)
            run.step = run.step + 1
            run.mid_update = False
            ledger.add(step)
        ledger.flush()
        assert stretch is not None
        highs, parts = microbatch_losses(run, stretch)
        high = sum(highs) / len(highs)
        recipe = sum(parts) / len(parts)
        check_evaluation(run, {"val/loss": high, "val/loss_recipe": recipe}, stretch.recipe.name)
    except NonFiniteError as error:
        problem = str(error)
    finally:
        run.data.feed.close()
    run.optimizer.zero_grad(set_to_none=True)
    seconds = round(time.perf_counter() - began, 3)
    if problem is not None:
        return Fork(recipe=None, high=None, train=None, problem=problem, seconds=seconds)
    train = sum(losses.by_step) / settings.steps
    return Fork(recipe=recipe, high=high, train=train, problem=None, seconds=seconds, parts=parts)


Job = tuple[int, int]
"""The index of a candidate, and the number of the fork."""


def here(
    subject: Subject,
    branches: Sequence[Branch],
    settings: ForkSettings,
    threads: int,
    jobs: Sequence[Job],
) -> Iterator[tuple[Job, Fork]]:
    """The forks of `jobs` in this process, each as it ends."""
    earlier_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for index, number in jobs:
            yield (index, number), fork(subject, branches[index], settings, number)
    finally:
        torch.set_num_threads(earlier_threads)


_MAKE: ContextVar[Callable[[Job], Fork]] = ContextVar("what makes forks in this process")


def in_processes(
    base: Base, request: ForkRequest, threads: int, jobs: Sequence[Job]
) -> Iterator[tuple[Job, Fork]]:
    """The forks of `jobs` in processes of their own, each as it ends; what is under way ends with
    the iterator.

    Raises:
        UserError: a process ended, or said so.
    """
    count = min(request.processes, len(jobs))
    candidates = [branch.candidate for branch in base.branches]
    task = replace(base, subject=None, branches=()), candidates, request, threads
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin_process, task)
    try:
        futures = {pool.submit(_make, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a process of the {request.noun} ended: if the memory is not enough for {count} of "
            "them, give processes=1. The forks that were done are recorded; the same command goes "
            "on"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _begin_process(
    base: Base, candidates: Sequence[RecipeCandidate], request: ForkRequest, threads: int
) -> None:
    """A process opens the checkpoint for its first fork, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("fp4train").addHandler(logging.NullHandler())
    logging.getLogger("fp4train").propagate = False
    torch.set_num_threads(threads)

    @cache
    def opened() -> tuple[Subject, list[Branch]]:
        subject = open_checkpoint(base.source, base.step, request.paths)
        return subject, [branch(subject, candidate, base.settings) for candidate in candidates]

    def make(job: Job) -> Fork:
        index, number = job
        try:
            with request.using_plugins():
                subject, branches = opened()
                return fork(subject, branches[index], base.settings, number)
        except (UserError, MemoryError, RuntimeError) as error:
            why = str(error) or type(error).__name__
            raise UserError(f"{candidates[index].name}, fork {number}: {why}") from None

    _MAKE.set(make)


def _make(job: Job) -> Fork:
    return _MAKE.get()(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
