"""The shuffle is a permutation for every size, and a function of seed and epoch only."""

import numpy as np
import pytest

from fp4train.data.permutation import permute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 100, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 1])
def test_every_index_is_hit_exactly_once(n: int, seed: int) -> None:
    image = permute(np.arange(n), n, seed=seed, epoch=0)
    assert sorted(image.tolist()) == list(range(n))


def test_an_index_goes_to_the_same_place_whoever_asks() -> None:
    n = 1003
    whole = permute(np.arange(n), n, seed=7, epoch=3)
    alone = [int(permute(np.array([i]), n, seed=7, epoch=3)[0]) for i in range(0, n, 97)]
    assert alone == whole[::97].tolist()


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(64), 64, seed=seed, epoch=epoch).tolist()) for seed in range(8) for epoch in range(8)
    }
    assert len(orders) == 64


def test_the_order_is_mixed_and_not_nearly_sorted() -> None:
    n = 10_000
    image = permute(np.arange(n), n, seed=0, epoch=0)
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(image))) == pytest.approx(n / 3, rel=0.05)


def test_a_first_step_of_a_huge_epoch_costs_nothing() -> None:
    n = 10**12
    image = permute(np.arange(1000), n, seed=0, epoch=0)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert image.max() < n


def test_the_order_never_changes_between_versions() -> None:
    """A run that resumes under a newer version must see the sequences it would have seen."""
    assert permute(np.arange(10), 10, seed=42, epoch=1).tolist() == [5, 9, 4, 2, 6, 8, 1, 0, 7, 3]
