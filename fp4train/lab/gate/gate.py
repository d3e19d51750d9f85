"""A gate: paired forks of two recipes, made until the test of `betting` has its verdict.

Every finished fork is recorded in RUN/studies/gate-STEP-…/measurements.jsonl. The verdict follows
from the forks round by round (one pair at each checkpoint), in the order of their seeds: a gate
that was killed, or is asked again, goes on with the same sequence, and one that has its verdict
measures nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp4train.config.binding import flattened
from fp4train.config.overrides import with_files
from fp4train.errors import UserError, user_errors
from fp4train.lab.gate.betting import Decision, decide
from fp4train.lab.gate.question import Answer, GateRequest, Questions
from fp4train.lab.gate.result import Answered, Estimated, gate_result
from fp4train.lab.studies import (
    Axis,
    Branch,
    Fork,
    Forks,
    RecipeCandidate,
    candidates,
    open_bases,
    study_progress,
    sweep_axes,
)
from fp4train.lab.studies.recorded_forks import make_missing, recorded_forks
from fp4train.lab.studies.sequential import Array
from fp4train.lab.studies.subject import described
from fp4train.run.checks import nothing_quantised
from fp4train.text import first_few

BLOCK = 8
"""Pairs of forks that are made between two looks, because a checkpoint is opened for each."""
DIFFERING = 3
"""Keys that a message names."""


def gate(request: GateRequest, announce: Callable[[Estimated], None]) -> Answered:
    """The answer, after forks are made until there is a verdict, or as many as were asked for.

    Args:
        announce: receives, before any fork is made, how many will be needed.

    Raises:
        UserError: there is no such checkpoint or option, the runs have different models, nothing
            differs between the recipes, or the reference diverged.
    """
    bases = open_bases(request, _choice(request))
    _check([base.branches for base in bases])
    with recorded_forks(request, bases) as forks:
        questions = Questions(forks)
        bound = questions.bound(request)
        earlier = questions.answers
        done = min(base_forks.recorded for base_forks in forks)
        estimated = Estimated.of(request, bound, _differences(forks, done))
        announce(estimated)
        if estimated.most:
            questions.begin(bound)
        decision, rounds = _made(request, forks, bound, done, estimated.most)
        differences = _differences(forks, rounds)
        answered = Answered(
            bases=bases,
            needed=Estimated.of(request, bound, differences),
            result=gate_result(
                bases,
                request.margin,
                bound,
                decision,
                differences,
                high=_differences(forks, rounds, "high"),
                diverged=_problems(forks, rounds),
                earlier=[answer for answer in earlier if not _same(answer, request, questions)],
            ),
        )
        if rounds:
            answer = Answer(
                margin=request.margin,
                of=tuple(questions.of),
                pairs=answered.result.pairs_at_verdict,
                verdict=decision.verdict,
            )
            questions.record(answer)
    return answered


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
    with study_progress("fork") as shown:
        while decision.verdict == "undecided" and rounds < most:
            rounds = min(most, rounds + block)
            make_missing(forks, rounds, most, shown)
            decision = judged(rounds)
    return decision, rounds


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
