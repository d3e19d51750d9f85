"""Comparisons that are looked at more than once: what they promise, by simulation
(scripts/paper/simulate_ranking.py).
"""

import math
from itertools import combinations

import numpy as np
import pytest
import simulate_ranking as simulated
from simulate_ranking import NOISE, Record, Way, draw, look, told_apart

from fp4train.lab.intervals import paired
from fp4train.lab.studies import ALPHA, Pair
from fp4train.lab.studies.sequential import compare, corrected, groups, needed, share

SKEWED = ("exponential", "one-in-ten spiky")
"""The noises that are furthest from what a test of means assumes."""


def at_most(rate: float, trials: int) -> float:
    """A share that trials of this rate exceed with a probability below 1 %."""
    return rate + 2.33 * math.sqrt(rate * (1 - rate) / trials)


def test_the_looks_share_the_whole_error_probability() -> None:
    assert [share(n) for n in (1, 2, 3, 4)] == pytest.approx([0.8, 0.1, 0.2 / 6, 0.2 / 12])
    assert sum(map(share, range(1, 10**5))) == pytest.approx(1, abs=1e-5)
    assert [needed(n) for n in (1, 2, 3)] == [6, 9, 11]
    assert all(
        2.0 ** (1 - needed(n)) <= ALPHA * share(n) < 2.0 ** (2 - needed(n)) for n in range(1, 9)
    )


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(
    ("trials", "forks", "candidates"),
    [
        (300, 6, 2),
        (300, 8, 5),
        pytest.param(1000, 12, 3, marks=pytest.mark.long),
        pytest.param(150, 8, 22, marks=pytest.mark.long),
    ],
)
def test_equal_candidates_are_told_apart_in_at_most_five_per_cent_of_the_rankings(
    trials: int, forks: int, candidates: int, noise: str
) -> None:
    """Whatever the losses' distribution; over all pairs. The exact rate is at most 4 %, the share
    of a first look.
    """
    rng = np.random.default_rng((trials, forks, candidates))
    false = sum(
        told_apart(simulated.one_look(rng, noise, forks, candidates)) for _ in range(trials)
    )
    assert false / trials <= at_most(ALPHA * share(1), trials)


@pytest.mark.parametrize(
    ("way", "noise", "trials"),
    [
        (simulated.in_pieces, "exponential", 60),
        (simulated.more_forks, "one-in-ten spiky", 60),
        *(
            pytest.param(way, noise, 100, marks=pytest.mark.long)
            for way in simulated.WAYS
            for noise in SKEWED
        ),
    ],
)
def test_no_way_of_asking_tells_equal_candidates_apart_more_often(
    way: Way, noise: str, trials: int
) -> None:
    """Candidates one by one, more forks, every reference and pair, subsets of checkpoints: any
    finding at any time.
    """
    rng = np.random.default_rng(trials)
    false = sum(any(map(told_apart, way(rng, noise))) for _ in range(trials))
    assert false / trials <= at_most(ALPHA, trials)


def test_two_standard_deviations_are_found_as_docs_say() -> None:
    """Five candidates, one worse by 2 standard deviations of a difference, from the reference: .58
    with 6 forks, .94 with 8, 1.00 with 12.
    """
    rng = np.random.default_rng(4)
    trials = 80
    for forks, wanted in ((6, 0.45), (8, 0.85), (12, 0.97)):
        found = 0
        for _ in range(trials):
            losses = draw(rng, "Gaussian", forks, 5)
            losses["c4"] = [loss + 2 * math.sqrt(2) for loss in losses["c4"]]
            pairs = look({"a": Record()}, losses, "c0")
            found += next(p for p in pairs if (p.first, p.second) == ("c0", "c4")).verdict == "here"
        assert found / trials >= wanted, forks


def test_equal_in_mean_is_not_the_null_and_skewed_differences_break_t() -> None:
    """One fork in ten spikes, in one of two candidates, whose means are equal: t tells them apart
    in far more than 5 %, and so do sign flips, whose null is the exchange of both losses.
    Differences of exchangeable spikes do not.
    """
    rng = np.random.default_rng(5)
    trials = 300
    one_sided = 0.1 * rng.normal(size=(trials, 6)) + 10 * (rng.random((trials, 6)) < 0.1) - 1
    both = NOISE["one-in-ten spiky"](rng, (trials, 6)) - NOISE["one-in-ten spiky"](rng, (trials, 6))
    for values, holds in ((one_sided, False), (both, True)):
        t = sum((paired([0.0] * 6, each.tolist()).p or 0) <= ALPHA for each in values) / trials
        flips = sum(corrected(each[:, None], [1.0])[0] <= ALPHA for each in values) / trials
        assert (t <= at_most(ALPHA, trials)) is holds and (flips <= at_most(ALPHA, trials)) is holds
        assert holds or t > 0.3


def test_the_p_of_a_pair_is_the_share_of_the_sign_patterns() -> None:
    """By hand: six differences of one sign are the most extreme of 2⁵; with a small one of the
    other sign, two are.
    """
    assert corrected(np.array([[1.0, 1.1, 0.9, 1.0, 1.2, 1.3]]).T, [1.0]) == [1 / 32]
    assert corrected(np.array([[1.0, 1.1, -0.1, 1.0, 1.2, 1.3]]).T, [1.0]) == [2 / 32]
    assert corrected(np.zeros((6, 2)), [1.0, 1.0]) == [1.0, 1.0]
    few = np.array([[1.0, 1.1, 0.9, 1.0, 1.2, 1.3], [2.0, 2.1, np.nan, np.nan, 2.2, 2.3]]).T
    assert corrected(few, [1.0, 1.0])[1] >= 1 / 8, "four forks have eight patterns"


def test_base_runs_that_differ_are_told_apart_here_and_beyond_only_with_the_spread_between_them() -> (
    None
):
    """Facts of four base runs: MXFP4 − NVFP4 and NVFP4 − BF16, eight forks at each."""
    rng = np.random.default_rng(6)
    noise = 0.0003 * rng.normal(size=(3, 4, 8))
    steady = np.array([0.0036, 0.0058, 0.0048, 0.0045])[:, None] + noise[0]
    unsteady = np.array([0.0048, 0.0016, 0.0010, 0.0047])[:, None] + noise[1]
    losses = {"bf16": noise[2].ravel(), "nvfp4": (noise[2] + steady).ravel()}
    losses["mxfp4"] = losses["nvfp4"] + unsteady.ravel()
    units = np.repeat(range(4), 8).tolist()
    pairs = compare(
        {name: each.tolist() for name, each in losses.items()},
        reference="bf16",
        look=1,
        margin=0,
        units=units,
    )
    assert [pair.verdict for pair in pairs] == ["different", "different", "here"]
    assert pairs[2].p < 1e-3 < ALPHA < pairs[2].beyond and pairs[2].difference.freedom == 3


def test_a_pair_with_forks_of_one_base_run_says_nothing_of_others() -> None:
    """Candidate c was measured at the first of two base runs alone: clear there, and unknown beyond
    it.
    """
    rng = np.random.default_rng(8)
    losses = {name: (0.01 * rng.normal(size=16)).tolist() for name in "ab"}
    losses["c"] = [
        1 + loss if i < 8 else None for i, loss in enumerate((0.01 * rng.normal(size=16)).tolist())
    ]
    pairs = compare(losses, reference="a", look=1, margin=0, units=[i // 8 for i in range(16)])
    assert [(p.first + p.second, p.verdict) for p in pairs] == [
        ("ab", "open"),
        ("ac", "here"),
        ("bc", "here"),
    ]
    assert [p.beyond for p in pairs[1:]] == [1, 1]


def test_a_look_that_told_two_apart_is_remembered() -> None:
    """Fork 7 and 8 are outliers: the pair stays told apart, its interval alone says how wide it has
    become.
    """
    first = [0.0] * 9
    second = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, -9.0, 9.0, 3.0]
    records = {"a": Record()}
    (early,), (late,) = (look(records, {"a": first[:n], "b": second[:n]}, "a") for n in (6, 9))
    assert early.verdict == late.verdict == "here" and late.p == early.p
    low, high = late.difference.interval() or (0.0, 0.0)
    assert low < 0 < high


def test_a_look_that_could_tell_nothing_apart_is_not_taken() -> None:
    rng = np.random.default_rng(7)
    records = {"a": Record()}
    losses = draw(rng, "Gaussian", 12, 2)
    numbers = []
    for forks in (5, 6, 6, 8, 9):
        (pair,) = look(records, {name: each[:forks] for name, each in losses.items()}, "c0")
        numbers.append(sum(key.startswith("look/") for key in records["a"].known))
        assert forks > 5 or pair.p == 1
    assert numbers == [0, 1, 1, 1, 2], (
        "the same table once more is the same look; a second one needs nine forks"
    )


def test_equal_losses_are_alike_and_others_only_within_the_margin() -> None:
    same = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    (pair,) = compare({"a": same, "b": same}, reference="a", look=1, margin=0)
    assert pair.verdict == "alike" and pair.simultaneous == (0, 0)
    rng = np.random.default_rng(6)
    losses = {
        name: [1e-4 * loss for loss in each] for name, each in draw(rng, "Gaussian", 12, 2).items()
    }
    assert [compare(losses, reference=None, look=1, margin=m)[0].verdict for m in (0.0, 1e-2)] == [
        "open",
        "alike",
    ]


def letters(order: str, apart: list[str]) -> str:
    nothing = paired([0.0, 0.0], [0.0, 1.0])
    pairs = [
        Pair(
            first=a,
            second=b,
            difference=nothing,
            p=0.0,
            beyond=1.0,
            simultaneous=(0.0, 0.0),
            verdict="here" if a + b in apart else "open",
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
def test_two_share_a_letter_exactly_if_they_are_not_told_apart(
    order: str, apart: list[str], expected: str
) -> None:
    assert letters(order, apart) == expected
    found = dict(zip(order, expected.split(), strict=True))
    for a, b in combinations(order, 2):
        assert bool(set(found[a]) & set(found[b])) == (a + b not in apart)
