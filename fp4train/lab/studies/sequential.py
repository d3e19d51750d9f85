"""Many comparisons, looked at more than once: p-values and intervals that stay honest however they
are asked for.

**Sign flips** assume no distribution. The null of a pair: its two losses of a fork are
exchangeable, either could have come from either candidate. Then the difference of each fork is as
probable with the other sign. All sign patterns of the differences that were seen are equally
probable, and

    p = the share of the sign patterns whose statistic is at least that of the pattern that was seen

is exact for every distribution, spikes included. Of n forks the least p is 1/2ⁿ⁻¹: six forks are
needed for p < .04.

Many pairs: the statistic is Student's t, turned into a normal deviate so that pairs with different
numbers of forks compare. All pairs of a fork flip together, and each pair is compared with the
largest deviate of all pairs that are not yet told apart (step-down max-T, Westfall and Young 1993).
Pairs that do not contain the reference count with `WEIGHT` times their deviate: comparisons with
the reference come first, and one test holds for them and all others together. Where the losses of
three and more equal candidates are skewed, their differences do not flip together exactly;
scripts/paper/simulate_ranking.py measures what that does: the test errs on the safe side.

A **look** is a table: all candidates that the record of a checkpoint holds, with the forks that
there are at that moment. More forks and other candidates make another look; the same table,
whatever is shown of it, is the same one. Looks are counted in the record (`Looks`), and each has a
share of the error probability α:

    share(1) = 0.8,   share(i) = 0.2/(i·(i − 1))   for i = 2, 3, …   (they sum to 1)

so that nothing is spent on looks that nobody takes, and who decides on the number of forks
beforehand has most of α for it. A pair's p over all looks is q = min over looks of p/share, p by
sign flips corrected for all pairs of the look. Without a difference P(any q ≤ α) ≤ Σ share·α = α,
whenever one stops (error spending as of Lan and DeMets, Biometrika 1983, by the union bound). α is
that of a checkpoint's record: checkpoints that are looked at one by one have α each.

That holds for the checkpoints of the table. Whether a difference holds for base runs like these is
a second question, asked where there are several: Student's t over the means of the base runs
(`over_units`), corrected for all pairs by Holm's procedure (Scand. J. Stat. 1979) and for looks by
the same shares. It assumes that base runs scatter nearly normally: two or three of them cannot show
it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.intervals import Estimate, estimate, holm, over_units
from fp4train.lab.studies.record import StudyRecord
from fp4train.lab.studies.subject import digest

VERDICTS = {
    "different": "told apart",
    "here": "told apart here",
    "alike": "alike",
    "open": "not told apart",
}
"""Verdicts on a pair (`Pair.verdict`), as tables write them."""
ALPHA = 0.05
_FIRST = 0.8
"""The share of the first look."""

WEIGHT = 0.85
"""The weight of pairs without the reference."""
GENERATORS = 13
"""The generators of the group of sign patterns: with up to 14 forks all patterns, with more a
subgroup of 2¹³, which is exact, too (Hemerik and Goeman, TEST 2018).
"""

Array = NDArray[np.float64]

_LOOK = "look/"
_REFERENCE = "reference"

Verdict = Literal["different", "here", "alike", "open"]
Found = tuple[float, float]
"""p of a pair on its checkpoints and beyond them, as `Pair` has them."""


def share(look: int) -> float:
    """The share of the error probability that look number `look` (from 1) at a record has."""
    if look == 1:
        return _FIRST
    return (1 - _FIRST) / (look * (look - 1))


def needed(look: int) -> int:
    """The fewest forks with which a look can tell anything apart: the least p of n forks is
    1/2ⁿ⁻¹.
    """
    return 1 + math.ceil(-math.log2(ALPHA * share(look)))


@lru_cache(maxsize=4)
def sign_patterns(count: int) -> Array:
    """Patterns × forks, ±1; the first pattern is all +1. A pattern and its opposite are the same
    test: the first sign is +1.
    """
    free = count - 1
    basis = np.eye(free)
    if free > GENERATORS:
        basis = np.random.default_rng(count).integers(0, 2, size=(GENERATORS, free)).astype(float)
    chosen = (np.arange(2 ** len(basis))[:, None] >> np.arange(len(basis))) & 1
    flipped = (chosen @ basis) % 2
    return 1 - 2 * np.concatenate([np.zeros((len(flipped), 1)), flipped], axis=1)


def deviates(differences: Array, signs: Array) -> Array:
    """Patterns × pairs: Student's t of the differences under each sign pattern as a normal deviate
    (Wallace 1959).

    Args:
        differences: forks × pairs; NaN where a pair lacks a fork.
    """
    freedom = np.isfinite(differences).sum(axis=0) - 1
    values = np.nan_to_num(differences)
    squares = (freedom + 1) * (values**2).sum(axis=0)
    r2 = (signs @ values) ** 2 / np.where(squares > 0, squares, 1)
    normal_deviates: Array = (
        (8 * freedom + 1)
        / (8 * freedom + 3)
        * np.sqrt(-freedom * np.log(np.maximum(1 - r2, 1e-15)))
    )
    return normal_deviates


def corrected(differences: Array, weights: Sequence[float]) -> list[float]:
    """The p of each pair, corrected for all of them.

    Args:
        differences: forks × pairs; NaN where a pair lacks a fork; at least two of each.
        weights: weights of the pairs.
    """
    scores = deviates(differences, sign_patterns(len(differences))) * np.asarray(weights)
    order = np.argsort(-scores[0], kind="stable")
    scores = scores[:, order]
    left = np.maximum.accumulate(scores[:, ::-1], axis=1)[:, ::-1]
    shares = (left >= scores[0] * (1 - 1e-9)).mean(axis=0)
    result = np.empty(len(order))
    result[order] = np.maximum.accumulate(shares)
    return [float(p) for p in result]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The paired difference of two candidates, `second` − `first`.

    Args:
        difference: mean difference, with the spread between base runs in its error where there are
            several.
        p: probability, if the two are exchangeable on these checkpoints, by sign flips, corrected
            for all pairs and looks; 1 before the first look.
        beyond: probability, if they are equal over base runs like these, corrected likewise; 1
            where one base run alone has forks of both.
        simultaneous: confidence interval on these checkpoints that holds together with those of
            all other pairs and looks; None before the first look.
        verdict: "different": told apart, p and `beyond` ≤ α; "here": told apart on these
            checkpoints, p ≤ α; "alike": on these checkpoints within ±margin, whatever the sign;
            "open": none of them.
    """

    first: str
    second: str
    difference: Estimate
    p: float
    beyond: float
    simultaneous: tuple[float, float] | None
    verdict: Verdict


def compare(
    losses: Mapping[str, Sequence[float | None]],
    *,
    reference: str | None,
    look: int | None,
    margin: float,
    units: Sequence[object] = (),
    earlier: Mapping[frozenset[str], Found] | None = None,
) -> list[Pair]:
    """All pairs of candidates that have two forks in common.

    Args:
        losses: candidate → loss of each fork, None where it was not made; the k-th losses of all
            candidates come from the same checkpoint and seed.
        reference: the candidate with which comparisons come first, chosen before any fork; or None.
        look: the number of this look; None: no test is made.
        margin: largest difference that does not matter; 0: every difference does.
        units: base run of each fork; empty: one.
        earlier: (p, beyond) of earlier looks at the same checkpoints.
    """
    arrays = {name: np.array(losses[name], dtype=float) for name in losses}
    gaps = {(a, b): arrays[b] - arrays[a] for a, b in combinations(losses, 2)}
    finite = {pair: np.isfinite(gap) for pair, gap in gaps.items()}
    gaps = {pair: gap for pair, gap in gaps.items() if finite[pair].sum() > 1 or len(gap) == 1}
    base = np.array(list(units) or [0] * max(map(len, losses.values()), default=0), dtype=object)
    forks = {pair: gap[finite[pair]].tolist() for pair, gap in gaps.items()}
    bases = {pair: base[finite[pair]].tolist() for pair in gaps}
    several = {pair for pair in gaps if len(set(bases[pair])) > 1}
    differences = {pair: over_units(values, bases[pair]) for pair, values in forks.items()}
    p = beyond = [1.0] * len(gaps)
    if look is not None and gaps:
        weights = [1.0 if reference in pair else WEIGHT for pair in gaps]
        p = [
            min(1.0, x / share(look))
            for x in corrected(np.stack(list(gaps.values()), axis=1), weights)
        ]
        over = [
            difference.p if pair in several and difference.p is not None else 1.0
            for pair, difference in differences.items()
        ]
        beyond = [min(1.0, x / share(look)) for x in holm(over)]
    compared = []
    for pair, here, further in zip(gaps, p, beyond, strict=True):
        simultaneous = None
        if look is not None:
            simultaneous = estimate(forks[pair]).interval(1 - ALPHA * share(look) / len(gaps))
        earlier_p = (earlier or {}).get(frozenset(pair), (1.0, 1.0))
        least = min(here, earlier_p[0]), min(further, earlier_p[1])
        compared.append(
            Pair(
                first=pair[0],
                second=pair[1],
                difference=differences[pair],
                p=least[0],
                beyond=least[1],
                simultaneous=simultaneous,
                verdict=_verdict(*least, simultaneous, margin),
            )
        )
    return compared


def _verdict(
    p: float, beyond: float, interval: tuple[float, float] | None, margin: float
) -> Verdict:
    if p <= ALPHA:
        return "different" if beyond <= ALPHA else "here"
    if interval is not None and max(map(abs, interval)) <= margin:
        return "alike"
    return "open"


def groups(order: Sequence[str], pairs: Sequence[Pair]) -> dict[str, str]:
    """Letters by candidate: two that share a letter are not told apart (Piepho, J. Comput. Graph.
    Stat. 2004).

    Args:
        order: the candidates from best to worst; the best one has an "a".
    """
    sets = [frozenset(order)] if order else []
    for pair in pairs:
        if pair.verdict in ("different", "here"):
            split: list[frozenset[str]] = []
            for alike in sets:
                if pair.first in alike and pair.second in alike:
                    split += [alike - {pair.first}, alike - {pair.second}]
                else:
                    split.append(alike)
            sets = [s for s in dict.fromkeys(split) if s and not any(s < other for other in split)]
    sets.sort(key=lambda alike: sorted(order.index(name) for name in alike))
    letters = "abcdefghijklmnopqrstuvwxyz"
    named = [letters[i] if i < len(letters) else f"({i + 1})" for i in range(len(sets))]
    return {
        name: "".join(letter for letter, alike in zip(named, sets, strict=True) if name in alike)
        for name in order
    }


class Looks:
    """The looks at a set of checkpoints, so that asking in pieces buys no significance.

    A record is one checkpoint's, and begins with its reference. A look is written into the record
    of every checkpoint of its table:

        "look/2": {"number": 2, "of": [checkpoints], "table": digest, "candidates": [keys],
                   "found": {"key key": [p, beyond]}}

    Its number is one more than the largest in any of these records, so that the numbers in a record
    only rise and the shares of its looks sum to at most 1. A table that was looked at before is the
    same look, whatever is shown of it.

    Args:
        records: records by the digest of their checkpoint.
        reference: key of the reference in each, which is recorded in those that have none yet:
            what comes first is chosen before there are forks.
    """

    def __init__(self, records: Mapping[str, StudyRecord], reference: Sequence[str]) -> None:
        self.records = records
        self.of = sorted(records)
        for record, key in zip(records.values(), reference, strict=True):
            if _REFERENCE not in record:
                record.add(_REFERENCE, {"key": key})
        references = {str(record[_REFERENCE]["key"]) for record in records.values()}
        self.reference = references.pop() if len(references) == 1 else None
        self._every = [
            values
            for record in records.values()
            for key, values in record.known.items()
            if key.startswith(_LOOK)
        ]

    @property
    def next(self) -> int:
        """The number of the next look."""
        return 1 + max((look["number"] for look in self._every), default=0)

    @property
    def seen(self) -> set[str]:
        """The keys of all candidates of these looks."""
        return {key for look in self._every for key in look["candidates"]}

    @property
    def earlier(self) -> dict[frozenset[str], Found]:
        """The least (p, beyond) of all looks at exactly these checkpoints, by the keys of two
        candidates.
        """
        least: dict[frozenset[str], Found] = {}
        for look in self._every:
            if look["of"] != self.of:
                continue
            for words, (p, beyond) in look["found"].items():
                pair = frozenset(words.split())
                smallest = least.get(pair, (1.0, 1.0))
                least[pair] = min(smallest[0], p), min(smallest[1], beyond)
        return least

    def number(self, table: Any, forks: int) -> int | None:
        """The number of the look at a table, which is any description of what is tested; None where
        its forks are too few to tell anything apart, so that no look is taken.
        """
        return self._known(table) or (self.next if forks >= needed(self.next) else None)

    def take(self, table: Any, candidates: Sequence[str], pairs: Sequence[Pair]) -> None:
        """Record the look at a table, if it is a new one. The pairs are named by keys."""
        if self._known(table) is not None:
            return
        probabilities = {
            f"{pair.first} {pair.second}": [pair.p, pair.beyond] for pair in pairs if pair.p < 1
        }
        number = self.next
        look = {
            "number": number,
            "of": self.of,
            "table": digest(table),
            "candidates": list(candidates),
            "found": probabilities,
        }
        for record in self.records.values():
            record.add(f"{_LOOK}{number}", look)

    def _known(self, table: Any) -> int | None:
        if not self._every:
            return None
        table_key = self.of, digest(table)
        return next(
            (
                int(look["number"])
                for look in self._every
                if (look["of"], look["table"]) == table_key
            ),
            None,
        )
