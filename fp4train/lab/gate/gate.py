"""A gate: paired forks of two recipes, made until the test of `betting` has its verdict.

Every finished fork is recorded in RUN/studies/gate-STEP-…/measurements.jsonl. The verdict follows
from the forks round by round (one pair at each checkpoint), in the order of their seeds: a gate
that was killed, or is asked again, goes on with the same sequence, and one that has its verdict
measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.config.binding import flattened
from fp4train.config.overrides import with_files
from fp4train.errors import UserError, user_errors
from fp4train.lab.gate.betting import Decision, decide, interval
from fp4train.lab.gate.question import Answer, GateRequest, Questions
from fp4train.lab.gate.result import ASSUMED, Answered, Estimated
from fp4train.lab.studies import (
    Axis,
    Branch,
    Fork,
    Forks,
    RecipeCandidate,
    Shown,
    candidates,
    open_bases,
    open_record,
    study_progress,
    sweep_axes,
)
from fp4train.lab.studies.sequential import Array
from fp4train.lab.studies.subject import described
from fp4train.run.checks import nothing_quantised
from fp4train.text import first_few

BLOCK = 8
"""Pairs of forks that are made between two looks, because a checkpoint is opened for each."""
DIFFERING = 3
"""Keys that a message names."""


def gate(
    request: GateRequest, announce: Callable[[Estimated], None]
) -> tuple[Answered, list[Path]]:
    """Make forks until there is a verdict, or as many as were asked for; the answer, and the folders
    that it belongs to: one of each checkpoint.

    Args:
        announce: receives, before any fork is made, how many will be needed.

    Raises:
        UserError: there is no such checkpoint or option, the runs have different models, nothing
            differs between the recipes, or the reference diverged.
    """
    bases = open_bases(request, _choice(request))
    _check([base.branches for base in bases])
    with ExitStack() as stack:
        folders = [base.folder_in(request.out, alone=len(bases) == 1) for base in bases]
        forks = [
            Forks(request, base, stack.enter_context(open_record(folder, base.identity, base.step)))
            for base, folder in zip(bases, folders, strict=True)
        ]
        questions = Questions(forks)
        bound = questions.bound(request)
        earlier = questions.answers
        done = min(base_forks.recorded for base_forks in forks)
        estimated = _estimated(request, forks, bound, done)
        announce(estimated)
        if estimated.most:
            questions.begin(bound)
        decision, rounds = _made(request, forks, bound, done, estimated.most)
        differences = _differences(forks, rounds)
        answered = Answered(
            bases=bases,
            margin=request.margin,
            bound=bound,
            differences=differences,
            high=_differences(forks, rounds, "high"),
            decision=decision,
            interval=interval(differences, bound) if rounds else (-math.inf, math.inf),
            problems=_problems(forks, rounds),
            earlier=[answer for answer in earlier if not _same(answer, request, questions)],
            needed=_estimated(request, forks, bound, rounds),
        )
        if rounds:
            answer = Answer(
                margin=request.margin,
                of=tuple(questions.of),
                pairs=decision.rounds * len(bases),
                verdict=decision.verdict,
            )
            questions.record(answer)
    if request.out is not None:
        folders = [request.out]
    return answered, folders


def _same(answer: Answer, request: GateRequest, questions: Questions) -> bool:
    """Whether an answer is to the question of today: this margin, at these checkpoints."""
    return answer.margin == request.margin and sorted(answer.of) == sorted(questions.of)


def _choice(request: GateRequest) -> Callable[[Mapping[str, Any]], list[RecipeCandidate]]:
    """The reference and the recipe that is tested, from the sections of a run."""
    tested_axes = sweep_axes(request.chosen, request.folders)
    for key, values in tested_axes:
        if len(values) > 1:
            raise UserError(
                f"{key}={','.join(text for text, _ in values)}: a gate is of one {key}; "
                "fp4train rank compares several"
            )
    with user_errors(UserError, before="against: "):
        reference_axes = sweep_axes(with_files([f"recipe={request.against}"]), request.folders)
        if len(reference_axes[0][1]) > 1:
            raise UserError("a gate has one reference")

    def choose(sections: Mapping[str, Any]) -> list[RecipeCandidate]:
        reference = candidates(reference_axes, sections)[0]
        tested = candidates(tested_axes, sections)[0]
        return [reference, replace(tested, name=_name(tested_axes))]

    return choose


def _name(axes: Sequence[Axis]) -> str:
    """ "nvfp4 policy=all": every word of the question."""
    words = [(key, values[0][0]) for key, values in axes]
    return " ".join(text if key == "recipe" else f"{key}={text}" for key, text in words)


def _check(by_base: Sequence[Sequence[Branch]]) -> None:
    """Raises UserError where the checkpoints are of different models, or both recipes run alike."""
    first_model = described(by_base[0][0].config.model)
    for branches in by_base[1:]:
        model = described(branches[0].config.model)
        if model != first_model:
            old = flattened({"model": first_model})
            new = flattened({"model": model})
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            raise UserError(
                f"the runs have different models ({first_few(keys, DIFFERING)}): a gate is of one "
                "model, and its mean over several says nothing of any; ask for each alone"
            )
    if all(reference.signature == tested.signature for reference, tested in by_base):
        reference, tested = by_base[0]
        reason = nothing_quantised(tested.plan)
        raise UserError(
            f"there is nothing to test: {tested.candidate.name} and {reference.candidate.name} run "
            f"every GEMM of this model alike{f'; {reason}' if reason else ''}"
        )


def _made(
    request: GateRequest, forks: Sequence[Forks], bound: float, done: int, most: int
) -> tuple[Decision, int]:
    """The decision, and the rounds that are recorded; makes forks until there is one, `most` rounds
    in all at most.
    """

    def judged(rounds: int) -> Decision:
        return decide(_differences(forks, rounds), request.margin, bound)

    rounds = done
    decision = judged(rounds)
    block = max(1, BLOCK // len(forks), -(-request.processes // 2))
    total = 2 * most * len(forks)
    with study_progress("fork") as shown:
        while decision.verdict == "undecided" and rounds < most:
            rounds = min(most, rounds + block)
            _make(forks, rounds, shown, total)
            decision = judged(rounds)
    return decision, rounds


def _make(forks: Sequence[Forks], rounds: int, shown: Shown, total: int) -> None:
    jobs = [base_forks.missing(rounds) for base_forks in forks]
    done = 2 * rounds * len(forks) - sum(map(len, jobs))
    shown(done, total)
    for base_forks, missing in zip(forks, jobs, strict=True):
        base_forks.make(missing, shown, done, total)
        done += len(missing)


def _pairs(forks: Forks, rounds: int) -> list[tuple[Fork, Fork]]:
    """The forks of the reference and of the recipe, by seed.

    Raises:
        UserError: the reference diverged.
    """
    reference, tested = forks.base.branches
    both = zip(forks.of(reference.key, rounds), forks.of(tested.key, rounds), strict=True)
    pairs = [(of_reference, fork) for of_reference, fork in both if of_reference and fork]
    for number, (fork, _) in enumerate(pairs):
        if fork.problem is not None:
            raise UserError(
                f"the reference {reference.candidate.name} diverged at {forks.base.title}, seed "
                f"{number}, so that there is nothing to compare with: {fork.problem}. Give a lower "
                "lr=…, or an earlier step=…"
            )
    return pairs


def _differences(forks: Sequence[Forks], rounds: int, measure: str = "recipe") -> Array:
    """The differences, [rounds, checkpoints]; infinite where the recipe diverged."""
    columns = [
        [
            getattr(tested, measure) - getattr(reference, measure)
            if tested.problem is None
            else math.inf
            for reference, tested in _pairs(base_forks, rounds)
        ]
        for base_forks in forks
    ]
    return np.array(columns, dtype=float).reshape(len(forks), rounds).T


def _problems(forks: Sequence[Forks], rounds: int) -> list[str]:
    return [
        f"{base_forks.base.title}, seed {number}: {tested.problem}"
        for base_forks in forks
        for number, (_, tested) in enumerate(_pairs(base_forks, rounds))
        if tested.problem is not None
    ]


def _estimated(
    request: GateRequest, forks: Sequence[Forks], bound: float, rounds: int
) -> Estimated:
    """How many forks will be needed, as far as `rounds` show."""
    differences = _differences(forks, rounds)
    finite = bool(rounds) and bool(np.isfinite(differences).all())
    deviation = ASSUMED * request.margin
    origin = "assumed"
    if request.deviation is not None:
        deviation = request.deviation
        origin = "as given"
    elif finite and rounds > 2:
        deviation = float(np.std(differences.mean(axis=1), ddof=1))
        origin = f"measured on {differences.size} pairs"
    return Estimated.of(
        request,
        bound=bound,
        deviation=deviation,
        origin=origin,
        checkpoints=len(forks),
        rounds=rounds,
        gap=float(differences.mean()) if finite else None,
    )
