"""The answer of a gate, and how many forks it will need: as text and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fp4train.lab.gate.betting import MOST_ROUNDS, Decision, rounds_needed
from fp4train.lab.gate.question import Answer, GateRequest
from fp4train.lab.studies import ALPHA, Base
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
    def of(
        cls,
        request: GateRequest,
        *,
        bound: float,
        deviation: float,
        origin: str,
        checkpoints: int,
        rounds: int,
        gap: float | None,
    ) -> Estimated:
        """The estimate for some gaps, and for the one that was measured."""

        def seeds(of_gap: float) -> int | None:
            return rounds_needed(of_gap, deviation, request.margin, bound)

        gaps = [share * request.margin for share in GAPS if share * request.margin < bound]
        needed = {at: seeds(at) for at in gaps if gap is None}
        if gap is not None:
            needed[gap] = seeds(gap)
        most = request.forks
        if most is None:
            most = seeds(PLANNED * request.margin) or MOST_ROUNDS
        return cls(
            margin=request.margin,
            bound=bound,
            deviation=deviation,
            origin=origin,
            needed=needed,
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
    """The answer of a gate. Losses in nats per token.

    Args:
        bases: checkpoints, each with the reference and the recipe.
        differences, high: differences in the recipe and in high precision, [rounds, checkpoints].
        interval: interval that holds the mean difference at all times.
        problems: forks that diverged.
        earlier: answers to other questions on these forks.
        needed: how many seeds the verdict will need, as far as these show.
    """

    bases: Sequence[Base]
    margin: float
    bound: float
    differences: Array
    high: Array
    decision: Decision
    interval: tuple[float, float]
    problems: Sequence[str]
    earlier: Sequence[Answer]
    needed: Estimated

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision.verdict]

    @property
    def pairs(self) -> int:
        """The number of pairs of forks."""
        return self.differences.size

    @property
    def reference(self) -> str:
        return self.bases[0].branches[0].candidate.name

    @property
    def tested(self) -> str:
        return self.bases[0].branches[1].candidate.name

    @property
    def excessive(self) -> int:
        """Pairs whose difference is larger than the bound."""
        return int((np.abs(self.differences) > self.bound).sum())

    @property
    def means(self) -> list[float]:
        """The mean difference at each checkpoint; infinite where a fork diverged, NaN without
        forks.
        """
        if not self.pairs:
            return [math.nan] * len(self.bases)
        return [float(mean) for mean in self.differences.mean(axis=0)]

    @property
    def gap(self) -> float | None:
        return float(self.differences.mean()) if self.pairs else None

    @property
    def gap_high(self) -> float | None:
        return float(self.high.mean()) if self.pairs else None

    @property
    def base_runs(self) -> int:
        return len({base.run for base in self.bases})

    def render(self) -> str:
        """One screen: the verdict, the gap, and what both hold for (gate.txt)."""
        rows = [
            [base.title, f"trained in {base.trained}", f"{mean:{FORM}}"]
            for base, mean in zip(self.bases, self.means, strict=True)
            if self.pairs
        ]
        return screen(
            __package__,
            "gate.txt",
            answered=self,
            by_base=tabulate([["checkpoint", "", "mean gap"], *rows], right=(2,)),
            more=next(iter(self.needed.needed.values()), None),
            form=FORM,
            alpha=ALPHA,
            confidence=1 - ALPHA,
            isfinite=math.isfinite,
        )


def gate_result(answered: Answered) -> GateResult:
    """Everything that a gate found, as its file has it; None: not known, or a fork that diverged."""
    low, high = map(_finite, answered.interval)
    return GateResult(
        checkpoints=tuple(
            GateCheckpoint.of(base, mean=_finite(mean))
            for base, mean in zip(answered.bases, answered.means, strict=True)
        ),
        recipe=answered.tested,
        against=answered.reference,
        margin=answered.margin,
        bound=answered.bound,
        verdict=answered.decision.verdict,
        pairs_at_verdict=answered.decision.rounds * len(answered.bases),
        pairs=answered.pairs,
        gap=_finite(answered.gap),
        gap_high=_finite(answered.gap_high),
        interval=(low, high),
        differences=tuple(tuple(map(_finite, row)) for row in answered.differences.tolist()),
        diverged=tuple(answered.problems),
        earlier=tuple(asdict(answer) for answer in answered.earlier),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
