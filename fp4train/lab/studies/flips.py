"""Tests of many paired differences by sign flips, which assume no distribution.

The null of a pair: its two losses of a fork are exchangeable, either could have come from either candidate. Then the
difference of each fork is as probable with the other sign. All sign patterns of the differences that were seen are
equally probable, and

    p = the share of the sign patterns whose statistic is at least that of the pattern that was seen

is exact for every distribution, spikes included. Of n forks the least p is 1/2ⁿ⁻¹: six forks are needed for p < .04.

Many pairs: the statistic is Student's t, turned into a normal deviate so that pairs with different numbers of forks
compare. All pairs of a fork flip together, and each pair is compared with the largest deviate of all pairs that are not
yet told apart (step-down max-T, Westfall and Young 1993). Pairs that do not contain the reference count with `WEIGHT`
times their deviate: comparisons with the reference come first, and one test holds for them and all others together.

Where the losses of three and more equal candidates are skewed, their differences do not flip together exactly;
scripts/simulate_ranking.py measures what that does: the test errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WEIGHT = 0.85
"""Of pairs without the reference."""
GENERATORS = 13
"""Of the group of sign patterns: with up to 14 forks all patterns, with more a subgroup of 2¹³, which is exact, too
(Hemerik and Goeman, TEST 2018)."""

Array = NDArray[np.float64]


@lru_cache(maxsize=4)
def sign_patterns(count: int) -> Array:
    """Patterns × forks, ±1; the first pattern is all +1. A pattern and its opposite are the same test: the first sign
    is +1."""
    free = count - 1
    basis = np.eye(free)
    if free > GENERATORS:
        basis = np.random.default_rng(count).integers(0, 2, size=(GENERATORS, free)).astype(float)
    chosen = (np.arange(2 ** len(basis))[:, None] >> np.arange(len(basis))) & 1
    flipped = (chosen @ basis) % 2
    return 1 - 2 * np.concatenate([np.zeros((len(flipped), 1)), flipped], axis=1)


def deviates(differences: Array, signs: Array) -> Array:
    """Patterns × pairs: Student's t of the differences under each sign pattern as a normal deviate (Wallace 1959).

    Args:
        differences: forks × pairs; NaN where a pair lacks a fork.
    """
    freedom = np.isfinite(differences).sum(axis=0) - 1
    values = np.nan_to_num(differences)
    squares = (freedom + 1) * (values**2).sum(axis=0)
    r2 = (signs @ values) ** 2 / np.where(squares > 0, squares, 1)
    found: Array = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(-freedom * np.log(np.maximum(1 - r2, 1e-15)))
    return found


def corrected(differences: Array, weights: Sequence[float]) -> list[float]:
    """The p of each pair, corrected for all of them.

    Args:
        differences: forks × pairs; NaN where a pair lacks a fork; at least two of each.
        weights: of the pairs.
    """
    found = deviates(differences, sign_patterns(len(differences))) * np.asarray(weights)
    order = np.argsort(-found[0], kind="stable")
    found = found[:, order]
    left = np.maximum.accumulate(found[:, ::-1], axis=1)[:, ::-1]
    shares = (left >= found[0] * (1 - 1e-9)).mean(axis=0)
    result = np.empty(len(order))
    result[order] = np.maximum.accumulate(shares)
    return [float(p) for p in result]
