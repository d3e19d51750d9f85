"""The test of a gate: its errors for differences of every kind (scripts/simulate_gate.py), and what
cannot change them.
"""

import math

import numpy as np
import pytest
import simulate_gate as simulated
from hypothesis import given
from hypothesis import strategies as st
from simulate_gate import NOISE, SPIKE

from fp4train.lab.gate.betting import (
    BOUND,
    STAKES,
    WEIGHTS,
    decide,
    decisions,
    evidence_below,
    interval,
    pairs_needed,
)
from fp4train.lab.studies.sequential import ALPHA

SIZES = [(300, 150), pytest.param(4000, 300, marks=pytest.mark.long)]


def at_most(trials: int) -> float:
    """A share that trials of the rate `ALPHA` exceed with a probability below 1 %."""
    return ALPHA + 2.33 * math.sqrt(ALPHA * (1 - ALPHA) / trials)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("trials", "pairs"), SIZES)
def test_both_errors_are_at_most_five_per_cent_whenever_one_stops(
    trials: int, pairs: int, noise: str
) -> None:
    """The mean is exactly a margin, and a verdict is looked for after every pair."""
    within, beyond = simulated.errors_of(noise, trials, pairs)
    assert within <= at_most(trials) and beyond <= at_most(trials)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("trials", "pairs"), SIZES)
def test_the_same_holds_for_the_mean_over_checkpoints_that_differ(
    trials: int, pairs: int, noise: str
) -> None:
    within, beyond = simulated.errors_over_checkpoints(noise, trials, pairs // 4)
    assert within <= at_most(trials) and beyond <= at_most(trials)


def test_any_margin_asked_on_the_same_forks_shares_the_error() -> None:
    """Margins from a tenth of the true gap to that gap itself, on the same 200 pairs: any false
    "within".
    """
    trials = 200
    for noise in NOISE:
        differences = 1 + NOISE[noise](np.random.default_rng(3), (trials, 200))
        false = np.zeros(trials, dtype=bool)
        for margin in np.linspace(0.1, 1, 19):
            false |= decisions(differences, margin, BOUND)[:, 0] > 0
        assert false.mean() <= at_most(trials), noise


@given(
    st.lists(st.floats(-2 * SPIKE, 2 * SPIKE), min_size=1, max_size=30),
    st.floats(-0.9 * BOUND, 0.9 * BOUND),
    st.floats(-0.9 * BOUND, 0.9 * BOUND),
)
def test_evidence_against_a_larger_level_is_never_less(
    differences: list[float], level: float, other: float
) -> None:
    """So that the levels that are not rejected are an interval."""
    low, high = sorted((level, other))
    values = np.array(differences)
    small = evidence_below(values, low, BOUND)
    large = evidence_below(values, high, BOUND)
    assert (small <= large + 1e-9).all()


def test_the_evidence_is_the_capital_of_the_bets_by_hand() -> None:
    differences = np.array([0.2, -0.4, 3.0])
    by_bet = [
        math.prod(1 + stake * (1 - value) / (BOUND - 1) for value in differences)
        for stake in STAKES
    ]
    capital = sum(weight * gain for weight, gain in zip(WEIGHTS, by_bet, strict=True))
    assert evidence_below(differences, 1, BOUND)[-1] == pytest.approx(math.log(capital))
    assert WEIGHTS.sum() == pytest.approx(1)


def test_a_verdict_is_what_the_interval_says() -> None:
    rng = np.random.default_rng(5)
    for gap, verdict in ((0.2, "within"), (1.0, "undecided"), (4.0, "beyond"), (-4.0, "beyond")):
        differences = gap + 0.3 * rng.normal(size=(60, 2))
        low, high = interval(differences, BOUND)
        assert low < gap < high
        assert decide(differences, 1, BOUND).verdict == verdict
        assert (verdict == "within") == (low > -1 and high < 1)
        assert (verdict == "beyond") == (low > 1 or high < -1)


def test_the_first_verdict_stands() -> None:
    """Whatever comes after it, as when somebody goes on until it suits."""
    differences = np.zeros((60, 1))
    decision = decide(differences, 1, BOUND)
    assert decision.verdict == "within"
    differences[decision.rounds :] = 9
    assert decide(differences, 1, BOUND) == decision


def test_a_fork_that_diverged_or_is_beyond_the_bound_is_never_within() -> None:
    for value in (math.inf, BOUND + 1, -BOUND - 1):
        differences = np.zeros((400, 1))
        differences[3] = value
        assert decide(differences, 1, BOUND).verdict == "undecided"
    assert decide(np.full((20, 1), math.inf), 1, BOUND).verdict == "beyond"


def test_no_verdict_of_a_small_gap_falls_before_a_spike_in_ten_would_be_seen() -> None:
    """Equal forks: 37 pairs, where .9³⁷ = 2 %."""
    decision = decide(np.zeros((100, 1)), 1, BOUND)
    assert decision.verdict == "within" and decision.rounds == 37
    assert decide(np.zeros((100, 4)), 1, BOUND).rounds == 10, "four checkpoints share the forks"


@pytest.mark.parametrize(("gap", "deviation"), [(0.0, 0.2), (0.5, 0.5), (2.0, 0.2), (-4.0, 1.0)])
def test_the_number_of_forks_that_is_said_is_enough_in_nine_of_ten_cases(
    gap: float, deviation: float
) -> None:
    pairs = pairs_needed(gap, deviation, 1, BOUND)
    assert pairs is not None
    differences = gap + deviation * np.random.default_rng(7).normal(size=(400, pairs))
    kinds = decisions(differences, 1, BOUND)[:, 0]
    right = 1 if abs(gap) < 1 else -1
    assert (kinds == right).mean() >= 0.84
    fewer = decisions(differences[:, : pairs * 3 // 4], 1, BOUND)[:, 0]
    assert (fewer == right).mean() < 0.9, "and not many more than that"


def test_a_gap_of_a_margin_needs_more_forks_than_anybody_makes() -> None:
    assert pairs_needed(1.0, 0.2, 1, BOUND) is None
    assert pairs_needed(0.0, 20.0, 1, BOUND) is None
