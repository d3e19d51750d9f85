"""The answer of a gate, and how many forks it will need: as text and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fp4train.lab.gate.betting import MOST_ROUNDS, Decision, interval, rounds_needed
from fp4train.lab.gate.question import Answer, GateRequest
from fp4train.lab.studies import Base
from fp4train.lab.studies.results import GateCheckpoint, GateResult
from fp4train.lab.studies.sequential import Array
from fp4train.text import screen, tabulate

EXIT_CODES = {"within": 0, "beyond": 1, "undecided": 2}
ASSUMED = 0.25
"""The deviation from seed to seed that nobody has measured, in margins."""
GAPS = (0.0, 0.5, 0.8, 2.0)
"""Gaps, in margins, for which the number of pairs is said, while none is measured."""
PLANNED = 0.5
"""The gap, in margins, that the default number of forks is enough for."""
FORM = "+.5f"


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """How many pairs of forks a gate will need.

    Args:
        deviation: standard deviation of a seed's mean difference over the checkpoints.
        origin: source of the deviation.
        needed: gap → seeds at each checkpoint with which the verdict falls in nine of ten cases;
            None: more than `MOST_ROUNDS`.
        checkpoints: number of checkpoints.
        rounds: seeds at each checkpoint that are recorded.
        most: seeds at each checkpoint that are made at most.
    """

    margin: float
    bound: float
    deviation: float
    origin: str
    needed: dict[float, int | None]
    checkpoints: int
    rounds: int
    most: int

    @classmethod
    def of(cls, request: GateRequest, bound: float, differences: Array) -> Estimated:
        """The estimate for some gaps, or for the one that is measured.

        Args:
            differences: differences of the forks that are made, [rounds, checkpoints].
        """
        rounds, checkpoints = differences.shape
        finite = bool(rounds) and bool(np.isfinite(differences).all())
        deviation = ASSUMED * request.margin
        origin = "assumed"
        if request.deviation is not None:
            deviation = request.deviation
            origin = "as given"
        elif finite and rounds > 2:
            deviation = float(np.std(differences.mean(axis=1), ddof=1))
            origin = f"measured on {differences.size} pairs"

        def seeds(of_gap: float) -> int | None:
            return rounds_needed(of_gap, deviation, request.margin, bound)

        gaps = [share * request.margin for share in GAPS if share * request.margin < bound]
        if finite:
            gaps = [float(differences.mean())]
        most = request.forks
        if most is None:
            most = seeds(PLANNED * request.margin) or MOST_ROUNDS
        return cls(
            margin=request.margin,
            bound=bound,
            deviation=deviation,
            origin=origin,
            needed={gap: seeds(gap) for gap in gaps},
            checkpoints=checkpoints,
            rounds=rounds,
            most=max(most, rounds),
        )

    def render(self) -> str:
        """Lines that say what will be needed, before forks are made."""
        rows = [
            [
                f"{gap:{FORM}}",
                "within" if abs(gap) < self.margin else "beyond",
                f"{'more than ' * (seeds is None)}{(seeds or MOST_ROUNDS) * self.checkpoints:,}",
            ]
            for gap, seeds in self.needed.items()
        ]
        return screen(
            __package__,
            "estimated.txt",
            estimated=self,
            table=tabulate([["true gap", "verdict", "pairs of forks"], *rows], right=(0, 2)),
        )


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The answer of a gate, and how many seeds a verdict will need, as far as these show."""

    bases: Sequence[Base]
    result: GateResult
    needed: Estimated

    def render(self) -> str:
        """One screen: the verdict, the gap, and what both hold for (gate.txt)."""
        rows = [
            (base.title, f"trained in {base.trained}", _shown(checkpoint.mean))
            for base, checkpoint in zip(self.bases, self.result.checkpoints, strict=True)
        ]
        differences = [x for row in self.result.differences for x in row]
        return screen(
            __package__,
            "gate.txt",
            answer=self.result,
            bases=self.bases,
            by_base=tabulate([["checkpoint", "", "mean gap"], *rows], right=(2,)),
            excessive=sum(x is None or abs(x) > self.result.bound for x in differences),
            more=next(iter(self.needed.needed.values()), None),
            shown=_shown,
            base_runs=len({base.run for base in self.bases}),
        )


def gate_result(
    bases: Sequence[Base],
    margin: float,
    bound: float,
    decision: Decision,
    differences: Array,
    *,
    high: Array,
    diverged: Sequence[str],
    earlier: Sequence[Answer],
) -> GateResult:
    """Everything that a gate found, as its file has it; None: not known, or a fork that diverged.

    Args:
        bases: checkpoints, each with the reference and the recipe.
        differences, high: differences in the recipe and in high precision, [rounds, checkpoints].
        earlier: answers to other questions on these forks.
    """
    reference, tested = (branch.candidate.name for branch in bases[0].branches)
    ends = (-math.inf, math.inf)
    if len(differences):
        ends = interval(differences, bound)
    return GateResult(
        checkpoints=tuple(
            GateCheckpoint.of(base, mean=_mean(differences[:, place]))
            for place, base in enumerate(bases)
        ),
        recipe=tested,
        against=reference,
        margin=margin,
        bound=bound,
        verdict=decision.verdict,
        pairs_at_verdict=decision.rounds * len(bases),
        pairs=differences.size,
        gap=_mean(differences),
        gap_high=_mean(high),
        interval=(_finite(ends[0]), _finite(ends[1])),
        differences=tuple(tuple(map(_finite, row)) for row in differences.tolist()),
        diverged=tuple(diverged),
        earlier=tuple(asdict(answer) for answer in earlier),
    )


def _mean(values: Array) -> float | None:
    return _finite(float(values.mean())) if values.size else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(gap: float | None) -> str:
    """A gap; that of a fork that diverged is above all others."""
    return format(math.inf if gap is None else gap, FORM)
