"""Estimates from measured gradients: unbiased on known distributions, and right on numbers worked
by hand.
"""

import math
from typing import Any

import numpy as np
import pytest

from fp4train.lab.intervals import estimate
from fp4train.lab.studies import RecipePart, judgement
from fp4train.lab.studies.findings import share, systematic
from fp4train.lab.studies.parts import CHOSEN, OF_THE_RUN, WHOLE
from fp4train.precision import NVFP4, PlannedStretch

DIMENSIONS = 40


def grams(vectors: np.ndarray[Any, Any], group: int = 4) -> list[list[list[float]]]:
    return [
        (vectors[i : i + group] @ vectors[i : i + group].T).tolist()
        for i in range(0, len(vectors), group)
    ]


def draws(seed: int, *, bias: float, noise: float, batches: int) -> tuple[list[Any], list[Any]]:
    """Errors with a systematic part of norm `bias`, gradients of norm 1, both with noise of norm
    `noise` a batch.
    """
    draw = np.random.default_rng(seed)
    direction = np.zeros(DIMENSIONS)
    direction[0] = 1.0
    noisy = draw.normal(0, noise / math.sqrt(DIMENSIONS), (2, batches, DIMENSIONS))
    return grams(bias * direction + noisy[0]), grams(direction + 0.1 * noisy[1])


def test_the_systematic_bias_is_unbiased_where_noise_is_much_larger() -> None:
    found = [systematic(*draws(seed, bias=0.2, noise=1.0, batches=8)) for seed in range(400)]
    mean = estimate([each.mean for each in found if each is not None])
    assert mean.count == 400 and mean.error is not None
    assert abs(mean.mean - 0.04) < 4 * mean.error < 0.02, "‖e‖² itself would be 1.04"


def test_its_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(300):
        found = systematic(*draws(seed, bias=0.5, noise=0.5, batches=8))
        interval = None if found is None else found.interval()
        assert interval is not None
        held += interval[0] <= 0.25 <= interval[1]
    assert held / 300 > 0.88, "the jackknife of a ratio is approximate"


def test_products_of_different_groups_do_not_count() -> None:
    one = [[[4.0, 1.0], [1.0, 9.0]], [[1.0, 3.0], [3.0, 1.0]]]
    ones = [[[2.0, 2.0], [2.0, 2.0]], [[2.0, 2.0], [2.0, 2.0]]]
    found = systematic(one, ones)
    assert found is not None and found.mean == pytest.approx((1 + 3) / (2 + 2))


def test_a_single_batch_and_a_gradient_lost_in_noise_have_no_systematic_bias() -> None:
    assert systematic([[[4.0]]], [[[4.0]]]) is None
    assert systematic([[[4.0, 1.0], [1.0, 4.0]]], [[[4.0, -1.0], [-1.0, 4.0]]]) is None


def test_two_batches_have_no_interval_of_the_gradient_and_so_no_systematic_bias() -> None:
    """Its ratio may be anything: −2.38 was printed where 8 batches give none."""
    assert systematic([[[4.0, 1.0], [1.0, 4.0]]], [[[4.0, 2.0], [2.0, 4.0]]]) is None


def test_a_gradient_whose_interval_holds_zero_has_no_systematic_bias() -> None:
    products = [
        [4.0, 0.1, 0.2, 3.0],
        [0.1, 4.0, 0.1, 0.2],
        [0.2, 0.1, 4.0, 0.1],
        [3.0, 0.2, 0.1, 4.0],
    ]
    assert systematic([products], [products]) is None, "one pair makes |G|²"
    ones = [[1.0 + 3 * (i == j) for j in range(4)] for i in range(4)]
    found = systematic([products], [ones])
    assert found is not None and found.mean == pytest.approx(3.7 / 6)


def test_a_policy_is_compared_batch_by_batch_on_what_judges_it() -> None:
    def of(errors: list[float]) -> Any:
        keys = {
            "cosine": [1.0] * 4,
            "loss": [0.0] * 4,
            "variance": [None] * 4,
        }
        return [{"error": errors, "gram": np.eye(4).tolist(), "layers": [[]] * 4, **keys}]

    stretch = PlannedStretch(start=0, stop=1, recipe=NVFP4(), reason="", layers={})
    measured = {
        name: (RecipePart(name=name, stretch=stretch, repeats=1), of(errors))
        for name, errors in {
            CHOSEN: [0.01, 1.01, 2.01, 3.01],
            WHOLE: [0.11, 1.12, 2.10, 3.11],
            OF_THE_RUN: [0.01, 1.02, 2.0, 3.01],
        }.items()
    }
    found = judgement(measured, [{"norm": [1.0] * 4, "gram": np.eye(4).tolist()}])
    assert found.batches == 4 and found.gain.mean == pytest.approx(0.1)
    low = found.gain.interval()
    assert low is not None and low[0] > 0.08, "what batches have in common does not count"
    assert found.over_own is not None and found.over_own.mean == pytest.approx(0.0, abs=1e-12)


def test_the_share_of_the_parts_is_above_the_floor_and_on_common_batches() -> None:
    def of(*groups: list[float]) -> list[dict[str, Any]]:
        return [{"error": group} for group in groups]

    measured = {
        "everything": of([0.11, 0.21], [0.31]),
        "nothing": of([0.01, 0.01], [0.01]),
        "a": of([0.06, 0.11], [9.0]),
        "b": of([0.04, 0.06]),
    }
    found = share(["a", "b"], measured)
    assert found is not None and found.mean == pytest.approx(
        (0.05 + 0.03 + 0.10 + 0.05) / (0.1 + 0.2)
    )
    assert share([], measured) is None
