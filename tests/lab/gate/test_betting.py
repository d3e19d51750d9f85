"""The test of a gate: its errors for differences of every kind (scripts/paper/simulate_gate.py), and what
cannot change them.
"""

import math

import numpy as np
import pytest
import simulate_gate as simulated
from hypothesis import given, strategies as st
from simulate_gate import DEPENDENT, NOISE, SPIKE

from fp4train.lab.gate import (
    BOUND,
    STAKES,
    WEIGHTS,
    decide,
    decisions,
    evidence_below,
    interval,
    rounds_needed,
)
from fp4train.lab.studies import ALPHA

SIZES = [(300, 150), pytest.param(1000, 300, marks=pytest.mark.long)]


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
    within, beyond = simulated.errors_over_checkpoints(noise, trials, pairs // 2)
    assert within <= at_most(trials) and beyond <= at_most(trials)


@pytest.mark.parametrize(("checkpoints", "correlation"), DEPENDENT)
@pytest.mark.parametrize("noise", ["Gaussian, 1", *(name for name in NOISE if "spikes" in name)])
@pytest.mark.parametrize(("trials", "rounds"), SIZES)
def test_the_same_holds_where_the_forks_of_a_seed_are_alike_at_all_checkpoints(
    trials: int, rounds: int, noise: str, checkpoints: int, correlation: float
) -> None:
    """As those of `schedule=linear`, which see the same batches and random bits: a bet on each
    would win too often.
    """
    within, beyond = simulated.errors_of_dependent(noise, checkpoints, correlation, trials, rounds)
    assert within <= at_most(trials) and beyond <= at_most(trials)


@pytest.mark.long
def test_any_margin_asked_on_the_same_forks_shares_the_error() -> None:
    """Margins from a tenth of the true gap to that gap itself, on the same 200 pairs: any false
    "within".
    """
    trials = 200
    for noise in NOISE:
        differences = 1 + NOISE[noise](np.random.default_rng(3), (trials, 200, 1))
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
    values = np.array(differences)[:, None]
    small = evidence_below(values, low, BOUND)
    large = evidence_below(values, high, BOUND)
    assert (small <= large + 1e-9).all()


def test_the_evidence_is_the_largest_capital_of_the_bets_by_hand() -> None:
    rounds = np.array([[0.4, 0.0], [-0.4, -0.4], [3.0, 3.0]])
    logs = []
    for count in (1, 2, 3):
        by_bet = [
            math.prod(1 + stake * (1 - mean) / (BOUND - 1) for mean in rounds[:count].mean(axis=1))
            for stake in STAKES
        ]
        capital = sum(weight * gain for weight, gain in zip(WEIGHTS, by_bet, strict=True))
        logs.append(math.log(capital))
    assert logs[2] < logs[1]
    evidence = evidence_below(rounds, 1, BOUND)
    assert evidence == pytest.approx([logs[0], logs[1], logs[1]])
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


def verdict_of_interval(differences: np.ndarray) -> str:
    """What the interval says of the margin 1."""
    low, high = interval(differences, BOUND)
    if low > -1 and high < 1:
        return "within"
    return "beyond" if low > 1 or high < -1 else "undecided"


@pytest.mark.parametrize("noise", NOISE)
def test_a_verdict_falls_when_the_interval_says_it_for_the_first_time(noise: str) -> None:
    """Also where its ends were shown at different looks, or a difference was beyond the bound."""
    rng = np.random.default_rng(11)
    drift = np.where(np.arange(80) < 40, -0.6, 0.6)[:, None]
    for gap in (0.0, 3.0, -3.0, *[drift] * 5):
        differences = gap + NOISE[noise](rng, (80, 1))
        decision = decide(differences, 1, BOUND)
        assert verdict_of_interval(differences[: decision.rounds]) == decision.verdict
        assert verdict_of_interval(differences[: decision.rounds - 1]) == "undecided"


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


def test_a_difference_below_minus_the_bound_forbids_what_one_above_it_forbids_on_the_other_side() -> (
    None
):
    """Otherwise 59 differences of 2 and one of −90, whose mean is .5, would be "beyond" 1."""
    differences = np.full((60, 1), 2.0)
    assert decide(differences, 1, BOUND).verdict == "beyond"
    differences[3] = -90
    for sign in (1, -1):
        assert decide(sign * differences, 1, BOUND).verdict == "undecided"
    assert interval(differences, BOUND)[0] == -math.inf
    differences[3] = 90
    assert decide(differences, 1, BOUND).verdict == "beyond", "and more so"


def test_no_verdict_of_a_small_gap_falls_before_a_spike_in_ten_would_be_seen() -> None:
    """Equal forks: 37 rounds, where .9³⁷ = 2 %; forks of the same seed may all have it or none."""
    for checkpoints in (1, 4):
        decision = decide(np.zeros((100, checkpoints)), 1, BOUND)
        assert decision.verdict == "within" and decision.rounds == 37


@pytest.mark.parametrize(("gap", "deviation"), [(0.0, 0.2), (0.5, 0.5), (2.0, 0.2), (-4.0, 1.0)])
def test_the_number_of_forks_that_is_said_is_enough_in_nine_of_ten_cases(
    gap: float, deviation: float
) -> None:
    rounds = rounds_needed(gap, deviation, 1, BOUND)
    assert rounds is not None
    differences = gap + deviation * np.random.default_rng(7).normal(size=(400, rounds, 1))
    kinds = decisions(differences, 1, BOUND)[:, 0]
    right = 1 if abs(gap) < 1 else -1
    assert (kinds == right).mean() >= 0.84
    fewer = decisions(differences[:, : rounds * 3 // 4], 1, BOUND)[:, 0]
    assert (fewer == right).mean() < 0.9, "and not many more than that"


@pytest.mark.long
def test_a_gap_of_a_margin_needs_more_forks_than_anybody_makes() -> None:
    assert rounds_needed(1.0, 0.2, 1, BOUND) is None
    assert rounds_needed(0.0, 20.0, 1, BOUND) is None
