"""The test of a gate: does the mean difference of paired forks lie within ±margin?

A difference is the loss of a fork in the recipe minus that of its pair in the reference. A round is
one pair at each checkpoint; d is the mean of its differences, each within ±bound. Against the
hypothesis that the mean is at least m one bets on small d: with the stake c, of which none is
larger than the capital,

    E(m) = Σ_c w_c · Π_i (1 + c · (m − d_i) / (bound − m)),   0 < c ≤ 1, Σ w_c = 1

If the mean is at least m, E is a supermartingale with the expectation 1, and by Ville's inequality
P(E ever reaches 1/α) ≤ α: whatever the distribution of the differences, whenever one looks and
stops (Waudby-Smith and Ramdas, J. R. Stat. Soc. B 2024). Rounds have seeds of their own. The forks
of one round may see the same batches and random bits, so their differences may depend on each other
in any way: the product of bets on each of them would have another expectation, the bet on their
mean has not. The price: a round decides as much as one pair does, however many checkpoints it has.

E rises with m, and an m that was rejected once stays rejected. So one event of probability α covers
all m at once: those that were not rejected are a confidence sequence, an interval that holds at all
times and for every margin that is asked.

    within      the interval lies inside ±margin
    beyond      the interval lies outside ±margin
    undecided   neither

Each end of the interval has α/2, so that both errors together are at most α. The first verdict
stands.

A difference above the bound counts as the bound, which is less than it is: from then on nothing is
said against large means, and the upper end is not known. One below −bound does so to the lower end.

The bound is the price. A recipe that costs `bound` in one fork of ten, and nothing in the others,
has a mean of bound/10, and 36 forks miss it with a probability of .9³⁶ = 2.3 %: no test can say
"within bound/10" after fewer forks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp4train.lab.studies import ALPHA
from fp4train.lab.studies.sequential import Array

STAKES = np.array([1.0, 0.5, 0.25, 0.1])
"""The bets, as shares of the largest one that cannot lose more than the capital."""
WEIGHTS = np.array([0.8, 0.1, 0.05, 0.05])
"""The capital that each bet begins with."""
THRESHOLD = math.log(2 / ALPHA)
"""The log evidence at which a hypothesis is rejected: α/2 for each end of the interval."""
BOUND = 10.0
"""The default bound, in margins."""

TRIALS = 200
MOST_ROUNDS = 2048
"""Simulated sequences, and rounds in each, of `rounds_needed`."""
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
    """Log evidence that the mean is below `level`: the largest so far, after each round; −∞ from
    the first difference above the bound on.

    Args:
        differences: [..., rounds, checkpoints], infinite where a fork diverged.
        level: hypothesis that is betted against; between −bound and bound.
        bound: largest size of a difference.
    """
    means = np.clip(differences, -bound, bound).mean(axis=-1, keepdims=True)
    means = np.clip(means, -bound, bound)  # a mean of bounds may be rounded beyond them
    with np.errstate(divide="ignore"):  # a full bet that lost everything
        gains = np.log(1 + STAKES * (level - means) / (bound - level))
    capital = np.logaddexp.reduce(np.cumsum(gains, axis=-2) + np.log(WEIGHTS), axis=-1)
    excessive = np.logical_or.accumulate((differences > bound).any(axis=-1), axis=-1)
    largest: Array = np.where(excessive, -math.inf, np.maximum.accumulate(capital, axis=-1))
    return largest


def decisions(differences: Array, margin: float, bound: float) -> Array:
    """The verdict of each sequence and the round after which it fell.

    Args:
        differences: [sequences, rounds, checkpoints].

    Returns:
        [sequences, 2]: 1 (within), −1 (beyond) or 0, and the number of rounds.
    """

    def rejected(values: Array, level: float) -> Bools:
        return evidence_below(values, level, bound) >= THRESHOLD

    within = rejected(differences, margin) & rejected(-differences, margin)
    beyond = rejected(differences, -margin) | rejected(-differences, -margin)
    rounds = within.shape[1]
    decided = within | beyond
    deciding_round = np.where(decided.any(axis=1), decided.argmax(axis=1), rounds - 1)
    rows = np.arange(len(differences))
    kinds = within[rows, deciding_round].astype(int) - (beyond & ~within)[
        rows, deciding_round
    ].astype(int)
    return np.stack([kinds, deciding_round + 1], axis=1).astype(float)


def decide(differences: Array, margin: float, bound: float) -> Decision:
    """The verdict on differences of forks, [rounds, checkpoints]."""
    if not len(differences):
        return Decision("undecided", 0)
    kind, after = decisions(differences[None], margin, bound)[0]
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

    def rejected(level: float) -> bool:
        return bool(evidence_below(differences, level, bound)[-1] >= THRESHOLD)

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


@lru_cache(maxsize=256)
def rounds_needed(gap: float, deviation: float, margin: float, bound: float) -> int | None:
    """Rounds after which the right verdict has fallen in nine of ten cases; None: more than
    `MOST_ROUNDS`.

    Args:
        gap: true mean difference.
        deviation: standard deviation of a round's mean, which is simulated as Gaussian.
    """
    verdict = 1 if abs(gap) < margin else -1
    noise = np.random.default_rng(0).normal(size=(TRIALS, MOST_ROUNDS, 1))
    rounds = 128
    while rounds <= MOST_ROUNDS:
        kinds, after = decisions(gap + deviation * noise[:, :rounds], margin, bound).T
        waits = np.sort(np.where(kinds == verdict, after, np.inf))
        enough = waits[math.ceil(CERTAINTY * TRIALS) - 1]
        if np.isfinite(enough):
            return int(enough)
        rounds *= 4
    return None
