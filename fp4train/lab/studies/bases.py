"""The checkpoints that forks begin from, opened with their candidates and settings."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fp4train import checkpoint
from fp4train.config import Config
from fp4train.data.passes import Passes
from fp4train.errors import UserError, user_errors
from fp4train.lab.studies.base import Base, ForkRequest, ForkSettings
from fp4train.lab.studies.candidates import SECTIONS, RecipeCandidate
from fp4train.lab.studies.forks import branch, checkpoint_command, course_of
from fp4train.lab.studies.subject import open_subject
from fp4train.run.checks import learning_rate
from fp4train.run.find import Command
from fp4train.run.record import directory as run_directory
from fp4train.text import counted

_log = logging.getLogger(__name__)

LOW_RATE = 0.1
"""Share of a run's largest learning rate below which forks are said to move little."""
CandidatesOf = Callable[[Mapping[str, Any]], list[RecipeCandidate]]
"""Function from the sections of a run, as plain values, to the candidates at its checkpoints."""


def open_bases(request: ForkRequest, candidates_of: CandidatesOf) -> list[Base]:
    """The checkpoints that a request names, each with its candidates.

    Args:
        candidates_of: function from the sections of a run, as plain values, to the candidates.

    Raises:
        UserError: there is no such checkpoint or option, or one is named twice.
    """
    places = [
        (source, _step(source, step))
        for source in map(run_directory.require_run, request.some_runs)
        for step in request.checkpoint_steps
    ]
    bases: dict[str, Base] = {}
    # all questions are refused that cannot be answered, before data are opened
    for asked in [_asked(request, candidates_of, *place) for place in places]:
        base = _open(request, asked, keep=len(places) == 1)
        if (same := bases.setdefault(base.mark, base)) is not base:
            raise UserError(f"{base.title} and {same.title} are the same checkpoint: name it once")
    return list(bases.values())


def _step(source: Path, requested: int | None) -> int:
    have = checkpoint.steps(source / run_directory.CHECKPOINTS)
    if not have:
        raise UserError(
            f"{source} has no checkpoint yet: forks need the weights and the moments of one"
        )
    if requested is not None and requested not in have:
        raise UserError(
            f"step={requested}: {source} has no such checkpoint; it has {', '.join(map(str, have))}"
        )
    return have[-1] if requested is None else requested


class _Asked(NamedTuple):
    """What is asked of a checkpoint, whose data are not opened."""

    source: Path
    step: int
    command: Command
    settings: ForkSettings
    candidates: Sequence[RecipeCandidate]


def _asked(request: ForkRequest, candidates_of: CandidatesOf, source: Path, step: int) -> _Asked:
    command = checkpoint_command(source, step, request.paths)
    assert command.saved is not None
    settings = _settings(request, command.config, source, step)
    sections = {name: command.saved[name] for name in SECTIONS}
    if settings.schedule == "linear":
        sections["phases"] = {}  # those of the run belong to its own schedule
    candidates = candidates_of(sections)
    for candidate in candidates:
        course_of(command.config, candidate, settings)
    return _Asked(source, step, command, settings, candidates)


def _open(request: ForkRequest, asked: _Asked, *, keep: bool) -> Base:
    settings = asked.settings
    subject = open_subject(asked.command, optimizer=True)
    run = subject.run
    passes = Passes(loader=run.data.validation, rows=run.microbatch_rows, batches=settings.batches)
    return Base(
        study=request.study,
        source=asked.source,
        step=asked.step,
        settings=settings,
        run=subject.identity["run"] or str(asked.source),
        trained=run.config.recipe.name,
        targets=passes.targets,
        identity={"study": request.study, **subject.identity, **asdict(settings)},
        branches=[branch(subject, candidate, settings) for candidate in asked.candidates],
        subject=subject if keep else None,
    )


def _warn_of_low_rate(config: Config, source: Path, step: int, lr: float) -> None:
    """Say that forks of a checkpoint from the end of a cooldown train with next to no rate."""
    cooldown = config.schedule.cooldown_start(config.train.steps)
    if cooldown is None or step <= cooldown or lr > LOW_RATE * config.optim.lr:
        return
    kept = checkpoint.steps(source / run_directory.CHECKPOINTS)
    earlier = [saved for saved in kept if saved <= cooldown]
    other = f"step={earlier[-1]} is from before the cooldown" if earlier else "lr=… sets another"
    _log.warning(
        "%s, step %d is from the cooldown: forks begin at a learning rate of %.3g, and the run's "
        "largest is %.3g; they move little, and so do gaps (%s)",
        source,
        step,
        lr,
        config.optim.lr,
        other,
    )


def _settings(request: ForkRequest, config: Config, source: Path, step: int) -> ForkSettings:
    left = config.train.steps - step
    own_schedule = request.schedule == "own"
    if own_schedule and left < 1:
        raise UserError(
            f"schedule=own: the run ends at step {config.train.steps}, no step is left after "
            f"step {step}; give an "
            "earlier step=…, or schedule=linear"
        )
    if own_schedule and request.lr is not None:
        raise UserError(
            "schedule=own has the rates of the run: leave out lr=, or give schedule=linear"
        )
    if own_schedule and request.steps is not None and request.steps > left:
        raise UserError(
            f"steps={request.steps}: the run has {counted(left, 'step')} left after step {step}"
        )
    if request.steps is not None:
        steps = request.steps
    elif own_schedule:
        steps = left
    else:
        steps = 24
    if request.lr is None:
        lr = learning_rate(config, min(step, config.train.steps - 1))
        _warn_of_low_rate(config, source, step, lr)
    else:
        lr = request.lr
    with user_errors(ValueError):
        return ForkSettings(
            steps=steps,
            schedule=request.schedule,
            lr=lr,
            batches=config.eval.batches if request.batches is None else request.batches,
        )
