"""Estimates from measured gradients: unbiased on known distributions, and right on numbers worked by hand."""

import math
from typing import Any

import numpy as np
import pytest

from fp4train.studies.findings import share, systematic
from fp4train.studies.statistics import estimate

DIMENSIONS = 40


def grams(vectors: np.ndarray[Any, Any], group: int = 4) -> list[list[list[float]]]:
    return [(vectors[i : i + group] @ vectors[i : i + group].T).tolist() for i in range(0, len(vectors), group)]


def draws(seed: int, *, bias: float, noise: float, batches: int) -> tuple[list[Any], list[Any]]:
    """Errors with a systematic part of norm `bias`, gradients of norm 1, both with noise of norm `noise` a batch."""
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


def test_two_batches_have_an_estimate_and_no_interval() -> None:
    found = systematic([[[4.0, 1.0], [1.0, 4.0]]], [[[4.0, 2.0], [2.0, 4.0]]])
    assert found is not None and found.mean == 0.5 and found.error is None


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
    assert found is not None and found.mean == pytest.approx((0.05 + 0.03 + 0.10 + 0.05) / (0.1 + 0.2))
    assert share([], measured) is None
