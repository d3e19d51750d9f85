"""What whole runs that exist already can say about a margin: the gap of each recipe's mean loss to
the first one's, beside the scatter of seeds.

    s         the standard deviation of a loss from seed to seed, pooled over all groups of runs that
              differ in run.seed only; f degrees of freedom
    interval  gap ± t · s · √(1/n₁ + 1/n₂), at 90 %: 5 % at each end (two one-sided tests,
              Schuirmann 1987)

Without a second seed in any group s is not known. Then the answer is for which s the gap would
count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp4train.lab.analysis import Comparison
from fp4train.lab.gate.betting import GateVerdict
from fp4train.lab.intervals import estimate, quantile
from fp4train.text import screen

CONFIDENCE = 0.9
NORMAL = 1.6449
"""The quantile of the normal distribution at 95 %, for a scatter that were known."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """The standard deviation of a loss from seed to seed.

    Args:
        deviation: None: no group of runs has several seeds.
        freedom: degrees of freedom. groups: number of groups with several seeds.
    """

    deviation: float | None
    freedom: int
    groups: int


@dataclass(frozen=True, kw_only=True)
class BesideMargin:
    """One group of runs beside the first.

    Args:
        name: name of its first run.
        seeds: numbers of runs of the first group and of this one.
        gap: difference of the mean losses, nats per token.
        interval: 90 % interval of the gap; None where the scatter is not known.
        largest: the deviation from seed to seed below which the gap would count as `would_be`.
    """

    name: str
    seeds: tuple[int, int]
    gap: float
    interval: tuple[float, float] | None
    verdict: GateVerdict
    would_be: GateVerdict
    largest: float


@dataclass(frozen=True, kw_only=True)
class WholeRuns:
    """All groups of a comparison beside a margin."""

    margin: float
    reference: str
    scatter: Scatter
    groups: Sequence[BesideMargin]

    def render(self) -> str:
        """Lines below the tables of a comparison."""
        return screen(__package__, "whole_runs.txt", beside=self, isfinite=math.isfinite)


def whole_runs(comparison: Comparison, margin: float) -> WholeRuns:
    """The groups of a comparison beside a margin in nats per token."""
    losses = [[comparison.losses[place] for place in group.places] for group in comparison.groups]
    names = [comparison.rows[group.places[0]].name for group in comparison.groups]
    scatter = _scatter(losses)
    return WholeRuns(
        margin=margin,
        reference=names[0],
        scatter=scatter,
        groups=[
            _beside(name, losses[0], of_group, scatter, margin)
            for name, of_group in zip(names[1:], losses[1:], strict=True)
        ],
    )


def _scatter(losses: Sequence[Sequence[float]]) -> Scatter:
    several = [of_group for of_group in losses if len(of_group) > 1]
    freedom = sum(len(of_group) - 1 for of_group in several)
    if not several:
        return Scatter(deviation=None, freedom=0, groups=0)
    squares = 0.0
    for of_group in several:
        mean = estimate(of_group).mean
        squares += math.fsum((loss - mean) ** 2 for loss in of_group)
    return Scatter(deviation=math.sqrt(squares / freedom), freedom=freedom, groups=len(several))


def _beside(
    name: str,
    reference: Sequence[float],
    losses: Sequence[float],
    scatter: Scatter,
    margin: float,
) -> BesideMargin:
    gap = estimate(losses).mean - estimate(reference).mean
    spread = math.sqrt(1 / len(reference) + 1 / len(losses))
    verdict: GateVerdict = "undecided"
    interval = None
    if scatter.deviation is not None and math.isfinite(gap):
        half = quantile(CONFIDENCE, scatter.freedom) * scatter.deviation * spread
        interval = (gap - half, gap + half)
        if abs(gap) + half < margin:
            verdict = "within"
        elif abs(gap) - half > margin:
            verdict = "beyond"
    return BesideMargin(
        name=name,
        seeds=(len(reference), len(losses)),
        gap=gap,
        interval=interval,
        verdict=verdict,
        would_be="within" if abs(gap) < margin else "beyond",
        largest=abs(margin - abs(gap)) / (NORMAL * spread),
    )
