"""Intervals and tests against closed forms, published tables, and samples of known
distributions.
"""

import math
import random

import pytest

from fp4train.lab.intervals import (
    estimate,
    holm,
    jackknife,
    over_units,
    paired,
    quantile,
    two_sided,
)

# t of a two-sided interval; a table that every textbook has.
TABLE = {
    (0.90, 1): 6.3138,
    (0.95, 1): 12.7062,
    (0.99, 1): 63.6567,
    (0.95, 2): 4.3027,
    (0.95, 3): 3.1824,
    (0.99, 4): 4.6041,
    (0.95, 7): 2.3646,
    (0.95, 10): 2.2281,
    (0.90, 30): 1.6973,
    (0.95, 1000): 1.9623,
}


@pytest.mark.parametrize(("wanted", "t"), TABLE.items())
def test_quantiles_are_those_of_the_table(wanted: tuple[float, int], t: float) -> None:
    assert quantile(*wanted) == pytest.approx(t, abs=6e-5)


@pytest.mark.parametrize("t", [0.1, 1.0, 3.7, 40.0])
def test_probabilities_equal_the_closed_forms_of_one_and_two_degrees_of_freedom(t: float) -> None:
    assert two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9)  # Cauchy
    assert two_sided(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert two_sided(0, 5) == 1 and two_sided(math.inf, 5) == 0


def test_a_mean_and_its_error_by_hand() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert (found.mean, found.count, found.freedom) == (3.0, 3, 2)
    assert found.error == pytest.approx(math.sqrt(7 / 3))
    low, high = found.interval() or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(3.0) and high - low == pytest.approx(
        2 * 4.30265 * math.sqrt(7 / 3)
    )
    assert found.t == pytest.approx(3 / math.sqrt(7 / 3))


def test_one_value_has_no_interval() -> None:
    found = estimate([0.5])
    assert found.mean == 0.5
    assert found.error is found.interval() is found.t is found.p is None


def test_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_equal_values_differ_from_zero_for_certain() -> None:
    assert estimate([2.0, 2.0]).t == math.inf and estimate([2.0, 2.0]).p == 0
    assert estimate([0.0, 0.0]).t == 0 and estimate([0.0, 0.0]).p == 1


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    draw = random.Random(0)
    samples = [[draw.gauss(3.0, 2.0) for _ in range(5)] for _ in range(2000)]
    intervals = [interval for each in samples if (interval := estimate(each).interval(0.9))]
    held = sum(low <= 3.0 <= high for low, high in intervals) / 2000
    assert abs(held - 0.9) < 4 * math.sqrt(0.09 / 2000)


@pytest.mark.parametrize("between", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("runs", [2, 3, 4])
def test_intervals_over_base_runs_hold_the_mean_of_all_base_runs(runs: int, between: float) -> None:
    """A random effect: with its spread in the interval, and never below the scatter of the
    forks.
    """
    draw = random.Random(runs)
    trials = 500
    held = 0
    for _ in range(trials):
        effects = [between * draw.gauss(0, 1) for _ in range(runs)]
        values = [effect + draw.gauss(0, 1) for effect in effects for _ in range(4)]
        found = over_units(values, [run for run in range(runs) for _ in range(4)])
        low, high = found.interval() or (0.0, 0.0)
        held += low <= 0 <= high
        assert found.freedom == runs - 1 and found.mean == pytest.approx(
            sum(values) / len(values), abs=1e-12
        )
    assert held / trials >= 0.95 - 2.33 * math.sqrt(0.95 * 0.05 / trials)


def test_base_runs_that_agree_by_chance_make_no_narrow_interval_and_one_is_no_spread() -> None:
    found = over_units([1.0, 3.0, 3.0, 1.0], ["a", "a", "b", "b"])
    assert found.mean == 2 and found.error == pytest.approx(math.sqrt(0.5)), (
        "the means are equal, the forks are not"
    )
    assert over_units([1.0, 3.0, 3.0, 1.0], ["a"] * 4) == estimate([1.0, 3.0, 3.0, 1.0])
    assert over_units([1.0, 2.0], ["a", "b"]).error == pytest.approx(0.5), "one fork at each"


def test_pairs_cancel_what_they_share() -> None:
    draw = random.Random(1)
    common = [draw.gauss(0, 100) for _ in range(8)]
    second = [value + 0.5 + draw.gauss(0, 0.01) for value in common]
    found = paired(common, second)
    assert found.mean == pytest.approx(0.5, abs=0.02) and (found.error or 1) < 0.01


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = [0.3, 1.7, -2.0, 0.1, 5.0]
    found = jackknife(5, lambda chosen: sum(values[i] for i in chosen) / len(chosen))
    wanted = estimate(values)
    assert found.mean == pytest.approx(wanted.mean) and found.error == pytest.approx(wanted.error)
    assert jackknife(2, lambda chosen: 1.0).error is None


def test_holm_corrects_each_test_for_those_that_are_left() -> None:
    # Holm 1979's procedure by hand
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
