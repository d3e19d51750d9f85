"""The result of a ranking: the gap of every candidate to the first, with intervals, tests and
groups, and as a table on one screen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from fp4train.lab.intervals import (
    CONFIDENCE,
    Estimate,
    estimate,
    over_units,
    paired,
    quantile,
)
from fp4train.lab.studies.base import Base
from fp4train.lab.studies.candidates import FLOOR
from fp4train.lab.studies.forks import Fork
from fp4train.lab.studies.sequential import (
    ALPHA,
    VERDICTS,
    Found,
    Pair,
    compare,
    groups,
    needed,
    share,
)
from fp4train.text import screen


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One candidate.

    Args:
        name: name in the tables.
        key: name in the record.
        forks: forks in the order of the checkpoints, and of their seeds; None: not made.
        asked: False: it is there for the floor of the noise only.
        same: other candidates that run every GEMM as this one does.
    """

    name: str
    key: str
    forks: Sequence[Fork | None]
    asked: bool = True
    same: Sequence[str] = ()

    @property
    def stands_for(self) -> list[str]:
        """The candidates in `same` that were asked for."""
        return [name for name in self.same if name not in FLOOR]

    @property
    def diverged(self) -> list[str]:
        """The problems that ended the forks that diverged."""
        return [
            fork.problem for fork in self.forks if fork is not None and fork.problem is not None
        ]

    def losses_by_fork(self, measure: str) -> list[float | None]:
        """The losses in the recipe ("recipe") or in high precision ("high") by fork; None where it
        was not made.
        """
        return [None if fork is None else getattr(fork, measure) for fork in self.forks]

    def losses(self, measure: str = "recipe") -> list[float]:
        """The losses of a candidate all of whose forks were made and none diverged."""
        return [float(loss) for loss in self.losses_by_fork(measure) if loss is not None]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The forks of all candidates, and the conclusions from them. Losses and gaps are in nats per
    token.

    Args:
        bases: the checkpoints.
        entries: candidates that were asked for: the reference, then the order of the sweep.
        unasked: candidates of the record that were not asked for: the tests count them, the tables
            do not show them.
        margin: differences below it do not matter.
        first_reference: key of the candidate that was the reference when the records began; None:
            they do not agree.
        earlier: results of earlier looks at these checkpoints, by the keys of two candidates.
        look: number of the look; None: too few forks for one.
        next_look: number that a look would have.
    """

    bases: Sequence[Base]
    entries: Sequence[Entry]
    unasked: Sequence[Entry] = ()
    margin: float
    first_reference: str | None = None
    earlier: Mapping[frozenset[str], Found] = field(default_factory=dict)
    look: int | None = None
    next_look: int = 1

    @property
    def reference(self) -> Entry:
        return self.entries[0]

    @property
    def forks(self) -> int:
        """The number of forks of each candidate, at all checkpoints."""
        return len(self.reference.forks)

    @property
    def tested(self) -> bool:
        """Whether there was a look, now or earlier."""
        return self.look is not None or bool(self.earlier)

    @property
    def per_base(self) -> int:
        return self.forks // len(self.bases)

    @cached_property
    def units(self) -> list[object]:
        """The unit that scatters independently, by fork: the base run; the checkpoint, where all
        are of one run.
        """
        runs = {base.run for base in self.bases}
        return [
            base.run if len(runs) > 1 else i
            for i, base in enumerate(self.bases)
            for _ in range(self.per_base)
        ]

    @cached_property
    def ranked(self) -> list[Entry]:
        """The candidates that were asked for, by their mean loss in the recipe; without those that
        diverged.
        """
        finished = [entry for entry in self.entries if entry.asked and not entry.diverged]
        return sorted(finished, key=lambda entry: math.fsum(entry.losses()))

    @cached_property
    def compared_entries(self) -> list[Entry]:
        """`ranked`, then all others that the record holds."""
        return [*self.ranked, *(entry for entry in self.unasked if not entry.diverged)]

    @cached_property
    def _tested_order(self) -> list[int]:
        """The forks by run and step of their checkpoint: whichever is named first, it is the same
        test and table.
        """
        return sorted(
            range(self.forks), key=lambda i: ((at := self.bases[i // self.per_base]).run, at.step)
        )

    @property
    def table(self) -> dict[str, Any]:
        """A description of what is tested: equal tables are one look."""
        entries = self.compared_entries
        present = {
            entry.key: [entry.forks[i] is not None for i in self._tested_order] for entry in entries
        }
        return {"forks": present, "first": self.first_reference}

    @cached_property
    def compared(self) -> list[Pair]:
        """All pairs of `compared_entries`, named by their keys."""
        recorded = {entry.key: entry.losses_by_fork("recipe") for entry in self.compared_entries}
        return compare(
            {key: [losses[i] for i in self._tested_order] for key, losses in recorded.items()},
            reference=self.first_reference,
            look=self.look,
            margin=self.margin,
            units=[self.units[i] for i in self._tested_order],
            earlier=self.earlier,
        )

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs of `ranked`, the better one first."""
        names = {entry.key: entry.name for entry in self.ranked}
        return [
            replace(pair, first=names[pair.first], second=names[pair.second])
            for pair in self.compared
            if pair.first in names and pair.second in names
        ]

    @cached_property
    def groups(self) -> dict[str, str]:
        """The letters of each candidate's groups, within which nothing is told apart."""
        return groups([entry.name for entry in self.ranked], self.pairs)

    @cached_property
    def floor(self) -> Estimate | None:
        """FP32 − BF16: what rounding alone does. None where one of them diverged."""
        by_name = {name: entry for entry in self.entries for name in (entry.name, *entry.same)}
        bf16, fp32 = (by_name[name] for name in FLOOR)
        if bf16.diverged or fp32.diverged:
            return None
        return self._difference(bf16, fp32, "recipe")

    def _difference(self, base: Entry, other: Entry, measure: str) -> Estimate:
        pairs = zip(base.losses(measure), other.losses(measure), strict=True)
        return over_units([b - a for a, b in pairs], self.units)

    def gap(self, entry: Entry, measure: str = "recipe") -> Estimate:
        """The loss of a candidate minus that of the reference, with the spread between base runs in
        its error.
        """
        return self._difference(self.reference, entry, measure)

    def by_base(self, entry: Entry) -> list[Estimate]:
        """The gap of a candidate at each checkpoint alone."""
        gaps = [b - a for a, b in zip(self.reference.losses(), entry.losses(), strict=True)]
        return [estimate(gaps[i : i + self.per_base]) for i in range(0, len(gaps), self.per_base)]

    def sampling(self, entry: Entry) -> float | None:
        """Half of the 95 % interval of the gap over other validation tokens: from its scatter over
        the passes of an evaluation, forks averaged; the mean of the checkpoints, which may share
        their tokens. None where there is one pass.

        A pass has a share of the gap by its targets, so that only what differs from it scatters.
        """
        halves = []
        for number, base in enumerate(self.bases):
            start = number * self.per_base
            both = zip(
                self.reference.forks[start : start + self.per_base],
                entry.forks[start:],
                strict=False,
            )
            gaps = [
                [b - a for a, b in zip(x.parts, y.parts, strict=True)] for x, y in both if x and y
            ]
            means = [math.fsum(part) / len(part) for part in zip(*gaps, strict=True)]
            if len(means) < 2:
                return None
            per_target = math.fsum(means) / sum(base.targets)
            shares = [per_target * count for count in base.targets]
            error = paired(shares, means).error or 0.0
            halves.append(quantile(CONFIDENCE, len(means) - 1) * error)
        return math.fsum(halves) / len(halves)

    def against_reference(self, entry: Entry) -> Pair | None:
        """The pair of a candidate and the reference; None for the reference itself."""
        names = {entry.name, self.reference.name}
        return next((pair for pair in self.pairs if {pair.first, pair.second} == names), None)

    def neighbours(self) -> list[Pair]:
        """The pairs of candidates that follow each other in the order."""
        order = pairwise(entry.name for entry in self.ranked)
        return [next(p for p in self.pairs if (p.first, p.second) == names) for names in order]


def render(ranking: Ranking, width: int | None = None) -> str:
    """One screen: the table, the order, the floor, and what the words mean (ranking.txt), in tables
    of `width`.
    """
    units = len(set(ranking.units))
    return screen(
        __package__,
        "ranking.txt",
        ranking=ranking,
        units=units,
        width=width,
        verdicts=VERDICTS,
        errors=quantile(CONFIDENCE, max(units - 1, 1)),
        least=-(-needed(ranking.next_look) // len(ranking.bases)),
        confidence=f"{CONFIDENCE:.0%}",
        alpha=ALPHA,
        share=share,
    )
