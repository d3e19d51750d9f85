"""Many comparisons, looked at more than once: p-values and intervals that stay honest however they are asked for.

A **look** is a table: all candidates that the record of a checkpoint holds, with the forks that there are at that
moment. More forks and other candidates make another look; the same table, whatever is shown of it, is the same one.
Looks are counted in the record (`fp4train.lab.studies.looks`), and each has a share of the error probability α:

    share(1) = 0.8,   share(i) = 0.2/(i·(i − 1))   for i = 2, 3, …   (they sum to 1)

so that nothing is spent on looks that nobody takes, and who decides on the number of forks beforehand has most of α for
it. A pair's p over all looks is q = min over looks of p/share, p by sign flips corrected for all pairs of the look
(`flips.py`). Without a difference P(any q ≤ α) ≤ Σ share·α = α, whenever one stops (error spending as of
Lan and DeMets, Biometrika 1983, by the union bound). α is that of a checkpoint's record: checkpoints that are looked at
one by one have α each.

That holds for the checkpoints of the table. Whether a difference holds for base runs like these is a second question,
asked where there are several: Student's t over the means of the base runs (`over_units`), corrected for all pairs by
Holm's procedure (Scand. J. Stat. 1979) and for looks by the same shares. It assumes that base runs scatter nearly
normally: two or three of them cannot show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from fp4train.lab.studies.flips import WEIGHT, corrected
from fp4train.lab.studies.statistics import Estimate, estimate, holm, over_units

ALPHA = 0.05
_FIRST = 0.8
"""The share of the first look."""

Verdict = Literal["apart", "here", "alike", "open"]
Found = tuple[float, float]
"""p of a pair on its checkpoints and beyond them, as `Pair` has them."""


def share(look: int) -> float:
    """The share of the error probability that look number `look` (from 1) at a record has."""
    return _FIRST if look == 1 else (1 - _FIRST) / (look * (look - 1))


def needed(look: int) -> int:
    """The fewest forks with which a look can tell anything apart: the least p of n forks is 1/2ⁿ⁻¹."""
    return 1 + math.ceil(-math.log2(ALPHA * share(look)))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The paired difference of two candidates, `second` − `first`.

    Args:
        difference: with the spread between base runs in its error where there are several.
        p: that the two are exchangeable on these checkpoints: by sign flips, corrected for all pairs and looks; 1
            before the first look.
        beyond: that they are equal over base runs like these, corrected likewise; 1 where one base run alone has forks
            of both.
        together: the interval on these checkpoints that holds together with those of all other pairs and looks;
            infinite before the first look.
        verdict: "apart": told apart, p and `beyond` ≤ α; "here": told apart on these checkpoints, p ≤ α; "alike": on
            these checkpoints within ±margin, whatever the sign; "open": none of them.
    """

    first: str
    second: str
    difference: Estimate
    p: float
    beyond: float
    together: tuple[float, float]
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
        losses: by candidate the loss of each fork, None where it was not made; the k-th of every candidate come from
            the same checkpoint and seed.
        reference: the candidate with which comparisons come first, chosen before any fork was made; None: none.
        look: the number of this look; None: no test is made.
        margin: differences below it do not matter; 0: every difference does.
        units: the base run of each fork; empty: one.
        earlier: (p, beyond) of earlier looks at the same checkpoints.
    """
    values = {name: np.array([math.nan if x is None else x for x in each]) for name, each in losses.items()}
    gaps = {(a, b): values[b] - values[a] for a, b in combinations(losses, 2)}
    gaps = {pair: each for pair, each in gaps.items() if np.isfinite(each).sum() > 1 or len(each) == 1}
    base = np.array(list(units) or [0] * max(map(len, losses.values()), default=0), dtype=object)
    differences = {
        pair: over_units(each[np.isfinite(each)].tolist(), base[np.isfinite(each)].tolist())
        for pair, each in gaps.items()
    }
    p = beyond = [1.0] * len(gaps)
    if look is not None and gaps:
        weights = [1.0 if reference in pair else WEIGHT for pair in gaps]
        p = [min(1.0, x / share(look)) for x in corrected(np.stack(list(gaps.values()), axis=1), weights)]
        several = {pair: len(set(base[np.isfinite(each)])) > 1 for pair, each in gaps.items()}
        over = [each.p if several[pair] and each.p is not None else 1.0 for pair, each in differences.items()]
        beyond = [min(1.0, x / share(look)) for x in holm(over)]
    found = []
    for pair, here, further in zip(gaps, p, beyond, strict=True):
        together = (-math.inf, math.inf)
        if look is not None:
            alone = estimate(gaps[pair][np.isfinite(gaps[pair])].tolist())
            together = alone.interval(1 - ALPHA * share(look) / len(gaps)) or together
        before = (earlier or {}).get(frozenset(pair), (1.0, 1.0))
        least = min(here, before[0]), min(further, before[1])
        verdict: Verdict = "open"
        if least[0] <= ALPHA:
            verdict = "apart" if least[1] <= ALPHA else "here"
        elif -margin <= together[0] and together[1] <= margin:
            verdict = "alike"
        found.append(
            Pair(
                first=pair[0],
                second=pair[1],
                difference=differences[pair],
                p=least[0],
                beyond=least[1],
                together=together,
                verdict=verdict,
            )
        )
    return found


def groups(order: Sequence[str], pairs: Sequence[Pair]) -> dict[str, str]:
    """Letters by candidate: two that share a letter are not told apart (Piepho, J. Comput. Graph. Stat. 2004).

    Args:
        order: the candidates from best to worst; the best one has an "a".
    """
    sets = [frozenset(order)] if order else []
    for pair in pairs:
        if pair.verdict in ("apart", "here"):
            split: list[frozenset[str]] = []
            for each in sets:
                both = pair.first in each and pair.second in each
                split += [each - {pair.first}, each - {pair.second}] if both else [each]
            sets = [s for s in dict.fromkeys(split) if s and not any(s < other for other in split)]
    sets.sort(key=lambda each: sorted(order.index(name) for name in each))
    letters = "abcdefghijklmnopqrstuvwxyz"
    named = [letters[i] if i < len(letters) else f"({i + 1})" for i in range(len(sets))]
    return {name: "".join(letter for letter, each in zip(named, sets, strict=True) if name in each) for name in order}
