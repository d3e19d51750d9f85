"""Comparisons that are looked at more than once: what they promise, by simulation with stated bounds."""

import math
import random
from itertools import combinations

import pytest

from fp4train.studies.sequential import Pair, compare, groups, looks, share
from fp4train.studies.statistics import paired


def draw(rng: random.Random, forks: int, gaps: list[float], scatter: float = 0.1) -> dict[str, list[float]]:
    """Paired losses: what a seed does to all candidates is ten times what it does to one of them."""
    common = [rng.gauss(0, 1) for _ in range(forks)]
    return {str(j): [c + gap + rng.gauss(0, scatter) for c in common] for j, gap in enumerate(gaps)}


def most_likely_at(probability: float, trials: int) -> float:
    """A count that is exceeded with a probability below 1e-4: mean + 4 standard deviations of the binomial."""
    return trials * probability + 4 * math.sqrt(trials * probability * (1 - probability))


def test_the_looks_share_the_whole_error_probability() -> None:
    assert looks(24) == [4, 6, 8, 12, 16, 24] and looks(3) == []
    assert share(4) == 0.1 and share(6) == 0.4 and share(24) == 0.1 and share(16) == 0.025
    assert sum(map(share, looks(2**40))) == pytest.approx(1, abs=1e-9)
    with pytest.raises(ValueError, match="forks=5: there is no look after as many; 4, 6, 8"):
        share(5)


@pytest.mark.parametrize(
    ("trials", "forks", "candidates"),
    [(300, 6, 3), pytest.param(400, 24, 4, marks=pytest.mark.long)],
)
def test_equal_candidates_are_told_apart_in_at_most_five_per_cent_of_the_rankings(
    trials: int, forks: int, candidates: int
) -> None:
    """Over all pairs and all looks; the same samples without a correction break the bound by far."""
    rng, false, uncorrected = random.Random(1), 0, 0
    for _ in range(trials):
        losses = draw(rng, forks, [0.0] * candidates)
        false += any(pair.verdict == "apart" for pair in compare(losses, margin=0))
        alone = (paired(losses[a][:n], losses[b][:n]).p for a, b in combinations(losses, 2) for n in looks(forks))
        uncorrected += any(p is not None and p <= 0.05 for p in alone)
    bound = most_likely_at(0.05, trials)
    assert false <= bound, f"{false} of {trials}"
    assert uncorrected > bound, "the samples show nothing"


def test_a_stop_when_the_answer_looks_clear_does_not_break_the_promise() -> None:
    """One candidate differs, two are equal: at any look, those are told apart in at most 5 % of the rankings."""
    rng, trials, false = random.Random(2), 250, 0
    for _ in range(trials):
        losses = draw(rng, 12, [0.0, 0.0, 5.0])
        for n in looks(12):
            pairs = compare({name: values[:n] for name, values in losses.items()}, margin=0.3)
            if all(pair.verdict != "open" for pair in pairs):
                break
        false += any({p.first, p.second} == {"0", "1"} and p.verdict == "apart" for p in pairs)
    assert false <= most_likely_at(0.05, trials), f"{false} of {trials}"


def test_intervals_of_all_pairs_hold_together() -> None:
    """All of them, at all looks, in at least 95 % of the rankings."""
    rng, trials, missed = random.Random(3), 150, 0
    gaps = [0.0, 0.1, 0.3]
    for _ in range(trials):
        losses = draw(rng, 6, gaps)
        found = [p for n in looks(6) for p in compare({k: v[:n] for k, v in losses.items()}, margin=0)]
        missed += any(not p.together[0] <= gaps[int(p.second)] - gaps[int(p.first)] <= p.together[1] for p in found)
    assert missed <= most_likely_at(0.05, trials), f"{missed} of {trials}"


def test_a_difference_of_six_standard_deviations_is_found_with_six_forks() -> None:
    """Four candidates, one standard deviation of the differences .14, steps of .85: in at least 80 %."""
    rng, trials = random.Random(4), 40
    found = sum(
        all(pair.verdict == "apart" for pair in compare(draw(rng, 6, [0, 0.85, 1.7, 2.55]), margin=0))
        for _ in range(trials)
    )
    assert found >= 0.8 * trials


def test_a_look_that_told_two_apart_is_remembered() -> None:
    """Fork 7 and 8 are outliers: the pair stays told apart, its interval alone says how wide it has become."""
    first = [0.0] * 8
    second = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, -9.0, 9.0]
    (early,), (late,) = (compare({"a": first[:n], "b": second[:n]}, margin=0) for n in (6, 8))
    assert early.verdict == late.verdict == "apart" and late.p == early.p
    low, high = late.difference.interval() or (0.0, 0.0)
    assert low < 0 < high


def test_forks_between_looks_count_for_the_interval_and_not_for_the_test() -> None:
    rng = random.Random(5)
    losses = draw(rng, 5, [0.0, 1.0])
    (four,) = compare({name: values[:4] for name, values in losses.items()}, margin=0)
    (five,) = compare(losses, margin=0)
    assert five.p == four.p and five.together == four.together and five.difference.count == 5


def test_fewer_than_four_forks_are_not_tested() -> None:
    (pair,) = compare({"a": [0.0, 0.0, 0.0], "b": [1.0, 1.0, 1.001]}, margin=0)
    assert pair.p == 1 and pair.verdict == "open" and pair.together == (-math.inf, math.inf)


def test_equal_losses_are_alike_and_others_only_within_the_margin() -> None:
    same = [1.0, 2.0, 3.0, 4.0]
    (pair,) = compare({"a": same, "b": same}, margin=0)
    assert pair.verdict == "alike" and pair.together == (0, 0)
    rng = random.Random(6)
    losses = draw(rng, 12, [0.0, 0.0], scatter=1e-4)
    assert [compare(losses, margin=m)[0].verdict for m in (0.0, 1e-2)] == ["open", "alike"]


def test_unequal_numbers_of_forks_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        compare({"a": [1.0, 2.0], "b": [1.0]}, margin=0)


def letters(order: str, apart: list[str]) -> str:
    nothing = paired([0.0, 0.0], [0.0, 1.0])
    pairs = [
        Pair(
            first=a,
            second=b,
            difference=nothing,
            p=0.0,
            together=(0.0, 0.0),
            verdict="apart" if a + b in apart else "open",
        )
        for a, b in combinations(order, 2)
    ]
    return " ".join(groups(list(order), pairs).values())


@pytest.mark.parametrize(
    ("order", "apart", "expected"),
    [
        ("xyz", [], "a a a"),
        ("xyz", ["xy", "xz", "yz"], "a b c"),
        ("xyz", ["xz"], "a ab b"),
        ("wxyz", ["wz", "xz", "wy"], "a ab bc c"),
        ("xyz", ["xy"], "a b ab"),
        ("x", [], "a"),
        ("", [], ""),
    ],
)
def test_two_share_a_letter_exactly_if_they_are_not_told_apart(order: str, apart: list[str], expected: str) -> None:
    assert letters(order, apart) == expected
    found = dict(zip(order, expected.split(), strict=True))
    for a, b in combinations(order, 2):
        assert bool(set(found[a]) & set(found[b])) == (a + b not in apart)
