"""The test of a gate: does the mean difference of paired forks lie within ±margin?

A difference d is the loss of a fork in the recipe minus that of its pair in the reference. It
counts as at most `bound` in size. Against the hypothesis that the mean is at least m one bets on
small differences: with the stake c, of which none is larger than the capital,

    E(m) = Σ_c w_c · Π_i (1 + c · (m − d_i) / (bound − m)),   0 < c ≤ 1, Σ w_c = 1

If the mean is at least m, E is a supermartingale with the expectation 1, and by Ville's inequality
P(E ever reaches 1/α) ≤ α: whatever the distribution of the differences, whenever one looks and
stops (Waudby-Smith and Ramdas, J. R. Stat. Soc. B 2024). Forks of several checkpoints have means of
their own; after rounds with one fork at each the product is at most that of their mean (geometric
and arithmetic mean), so that the test is of the mean over the checkpoints.

E rises with m. So one event of probability α covers all m at once: the m that were not rejected are
a confidence sequence, an interval that holds at all times and for every margin that is asked.

    within      the interval lies inside ±margin, and no difference was larger than the bound
    beyond      the interval lies outside ±margin
    undecided   neither

Each end of the interval has α/2, so that both errors together are at most α. The first verdict
stands.

The bound is the price. A recipe that costs `bound` in one fork of ten, and nothing in the others,
has a mean of bound/10, and 36 forks miss it with a probability of .9³⁶ = 2.3 %: no test can say
"within bound/10" after fewer forks.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.studies.sequential import ALPHA, Array

STAKES = np.array([1.0, 0.5, 0.25, 0.1])
"""The bets, as shares of the largest one that cannot lose more than the capital."""
WEIGHTS = np.array([0.8, 0.1, 0.05, 0.05])
"""The capital that each bet begins with."""
THRESHOLD = math.log(2 / ALPHA)
"""The log evidence at which a hypothesis is rejected: α/2 for each end of the interval."""
BOUND = 10.0
"""The default bound, in margins."""

TRIALS = 200
MOST_PAIRS = 2048
"""Simulated sequences, and pairs in each, of `pairs_needed`."""
CERTAINTY = 0.9
STEPS = 50
"""Halvings of the search for an end of the interval."""

Bools = NDArray[np.bool_]
GateVerdict = Literal["within", "beyond", "undecided"]


@dataclass(frozen=True)
class Decision:
    """The verdict, and the number of rounds after which it fell; all rounds while undecided."""

    verdict: GateVerdict
    rounds: int


def evidence_below(differences: Array, level: float, bound: float) -> Array:
    """Log evidence that the mean is below `level`, after each difference.

    Args:
        differences: [..., differences], infinite where a fork diverged.
        level: hypothesis that is betted against; between −bound and bound.
        bound: largest size that a difference counts as.
    """
    counted = np.clip(differences, -bound, bound)[..., None]
    with np.errstate(divide="ignore"):  # a full bet that lost everything
        gains = np.log(1 + STAKES * (level - counted) / (bound - level))
    capital: Array = np.logaddexp.reduce(np.cumsum(gains, axis=-2) + np.log(WEIGHTS), axis=-1)
    return capital


def decisions(differences: Array, margin: float, bound: float, checkpoints: int = 1) -> Array:
    """The verdict of each sequence and the round after which it fell.

    Args:
        differences: [sequences, rounds · checkpoints], round by round.

    Returns:
        [sequences, 2]: 1 (within), −1 (beyond) or 0, and the number of rounds.
    """
    last = slice(checkpoints - 1, None, checkpoints)

    def rejected(values: Array, level: float) -> Bools:
        return evidence_below(values, level, bound)[:, last] >= THRESHOLD

    excessive = np.cumsum(np.abs(differences) > bound, axis=1)[:, last] > 0
    within = rejected(differences, margin) & rejected(-differences, margin) & ~excessive
    beyond = rejected(differences, -margin) | rejected(-differences, -margin)
    rounds = within.shape[1]
    decided = within | beyond
    first = np.where(decided.any(axis=1), decided.argmax(axis=1), rounds - 1)
    rows = np.arange(len(differences))
    kinds = within[rows, first].astype(int) - (beyond & ~within)[rows, first].astype(int)
    return np.stack([kinds, first + 1], axis=1).astype(float)


def decide(differences: Array, margin: float, bound: float) -> Decision:
    """The verdict on differences of forks, [rounds, checkpoints]."""
    rounds, checkpoints = differences.shape
    if not rounds:
        return Decision("undecided", 0)
    kind, after = decisions(differences.reshape(1, -1), margin, bound, checkpoints)[0]
    verdict: GateVerdict = "undecided"
    if kind:
        verdict = "within" if kind > 0 else "beyond"
    return Decision(verdict, int(after))


def interval(differences: Array, bound: float) -> tuple[float, float]:
    """The interval that holds the mean with 1 − α at all times; infinite ends are not known yet.

    Args:
        differences: [rounds, checkpoints].
    """
    return -_upper_end(-differences, bound), _upper_end(differences, bound)


def _upper_end(differences: Array, bound: float) -> float:
    """The least level that is rejected: the mean is below it."""
    flat = differences.reshape(-1)
    last = slice(differences.shape[1] - 1, None, differences.shape[1])

    def rejected(level: float) -> bool:
        return bool((evidence_below(flat, level, bound)[last] >= THRESHOLD).any())

    low = -bound
    high = bound * (1 - 1e-9)
    if not rejected(high):
        return math.inf
    for _ in range(STEPS):
        middle = (low + high) / 2
        if rejected(middle):
            high = middle
        else:
            low = middle
    return high


def pairs_needed(
    gap: float, deviation: float, margin: float, bound: float, checkpoints: int = 1
) -> int | None:
    """Pairs of forks, over all checkpoints, after which the right verdict has fallen in nine of ten
    cases; None: more than `MOST_PAIRS`.

    Args:
        gap: true mean difference.
        deviation: standard deviation of a difference, which is simulated as Gaussian.
    """
    verdict = 1 if abs(gap) < margin else -1
    noise = np.random.default_rng(0).normal(size=(TRIALS, MOST_PAIRS))
    pairs = 128
    while pairs <= MOST_PAIRS:
        rounds = pairs // checkpoints
        used = noise[:, : rounds * checkpoints]
        kinds, after = decisions(gap + deviation * used, margin, bound, checkpoints).T
        waits = np.sort(np.where(kinds == verdict, after, np.inf))
        enough = waits[math.ceil(CERTAINTY * TRIALS) - 1]
        if np.isfinite(enough):
            return int(enough) * checkpoints
        pairs *= 4
    return None
