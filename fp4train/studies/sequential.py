"""Many comparisons, looked at more than once: p-values and intervals that stay honest.

A ranking is looked at after 4, 6, 8, 12, 16, 24, … forks, so that it can stop when the answer is clear, and it can be
taken up again with more forks later. Each look has a fixed share of the error probability, whatever was seen before
and whenever one stops:

    share(4·2ʲ) = 0.1/2ʲ,   share(6·2ʲ) = 0.4/2ʲ,   j = 0, 1, 2, …   (they sum to 1)

A pair's p-value over all looks so far is q = min over looks of p/share, the union bound of the looks (error spending as
of Lan and DeMets, Biometrika 1983, without their joint distribution, which a t statistic of few forks does not have).
Without a difference P(q ≤ α) ≤ Σ share·α = α at every stopping time. Holm's procedure (Scand. J. Stat. 1979) on the q
of all pairs then keeps the probability of any false "told apart" in the whole ranking at or below α. Intervals at a
look are those of Jennison and Turnbull (J. R. Stat. Soc. B 1989): their confidence is 1 − α·share/pairs, so that all of
them at all looks hold together with a probability of at least 1 − α.

What is assumed: differences of forks with different seeds are independent and nearly normal, as in any t test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from fp4train.studies.statistics import Estimate, holm, paired

ALPHA = 0.05
_FIRST = {4: 0.1, 6: 0.4}
"""The shares of the looks after 4 and 6 forks; with every doubling of the forks they halve."""

Verdict = Literal["apart", "alike", "open"]


def looks(forks: int) -> list[int]:
    """The numbers of forks, up to `forks`, at which a ranking is looked at."""
    found = {base * 2**j for base in _FIRST for j in range(max(forks, 1).bit_length())}
    return sorted(n for n in found if n <= forks)


def share(forks: int) -> float:
    """The share of the error probability that the look after `forks` forks has.

    Raises:
        ValueError: there is no look after as many.
    """
    for base, first in _FIRST.items():
        doublings = (forks // base).bit_length() - 1
        if forks == base * 2 ** max(doublings, 0):
            return float(first / 2**doublings)
    raise ValueError(f"forks={forks}: there is no look after as many; {', '.join(map(str, looks(64)))}, … have one")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The paired difference of two candidates, `second` − `first`.

    Args:
        difference: over all forks.
        p: corrected for all pairs and all looks; 1 before the first look.
        together: the interval that holds together with those of all other pairs and looks; infinite before the first
            look.
        verdict: "apart": told apart; "alike": within ±margin, whatever the sign; "open": neither.
    """

    first: str
    second: str
    difference: Estimate
    p: float
    together: tuple[float, float]
    verdict: Verdict


def compare(losses: Mapping[str, Sequence[float]], *, margin: float, alpha: float = ALPHA) -> list[Pair]:
    """All pairs of candidates.

    Args:
        losses: by candidate the loss of each fork; the k-th of every candidate come from the same seed.
        margin: differences below it do not matter; 0: every difference does.
        alpha: the probability of any false "apart" in the whole result, and of any false "alike".

    Raises:
        ValueError: the candidates have different numbers of forks, or none.
    """
    names = list(combinations(losses, 2))
    if not names:
        return []
    values = [(losses[first], losses[second]) for first, second in names]
    differences = [paired(a, b) for a, b in values]
    at_looks = [[(n, paired(a[:n], b[:n])) for n in looks(len(a))] for a, b in values]
    corrected = holm([min([1.0, *((d.p or 0.0) / share(n) for n, d in each)]) for each in at_looks])
    found = []
    for (first, second), difference, each, p in zip(names, differences, at_looks, corrected, strict=True):
        together = (-math.inf, math.inf)
        if each:
            n, last = each[-1]
            together = last.interval(1 - alpha * share(n) / len(names)) or together
        verdict: Verdict = "open"
        if p <= alpha:
            verdict = "apart"
        elif -margin <= together[0] and together[1] <= margin:
            verdict = "alike"
        pair = Pair(first=first, second=second, difference=difference, p=p, together=together, verdict=verdict)
        found.append(pair)
    return found


def groups(order: Sequence[str], pairs: Sequence[Pair]) -> dict[str, str]:
    """Letters by candidate: two that share a letter are not told apart (Piepho, J. Comput. Graph. Stat. 2004).

    Args:
        order: the candidates from best to worst; the best one has an "a".
    """
    sets = [frozenset(order)] if order else []
    for pair in pairs:
        if pair.verdict == "apart":
            split: list[frozenset[str]] = []
            for each in sets:
                both = pair.first in each and pair.second in each
                split += [each - {pair.first}, each - {pair.second}] if both else [each]
            sets = [s for s in dict.fromkeys(split) if s and not any(s < other for other in split)]
    sets.sort(key=lambda each: sorted(order.index(name) for name in each))
    letters = "abcdefghijklmnopqrstuvwxyz"
    named = [letters[i] if i < len(letters) else f"({i + 1})" for i in range(len(sets))]
    return {name: "".join(letter for letter, each in zip(named, sets, strict=True) if name in each) for name in order}
