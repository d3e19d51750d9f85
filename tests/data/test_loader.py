"""Batches are a pure function of (seed, position), fetched in advance or not; the shuffle is a
permutation.
"""

import threading

import numpy as np
import pytest
import torch
from command_line import PATIENCE

from fp4train.data import DataError, Feed, Loader, TokenArray, permute

CPU = torch.device("cpu")


def counting(n: int) -> TokenArray:
    return TokenArray(np.arange(n, dtype=np.uint32), vocab_size=n, name="train")


def test_targets_are_the_inputs_one_token_on() -> None:
    inputs, targets = Loader(counting(1000), batch_size=4, seq_len=16, seed=0).batch(5)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_an_epoch_predicts_every_token_exactly_once() -> None:
    loader = Loader(counting(16 * 30 + 1), batch_size=4, seq_len=16, seed=3)
    assert loader.sequences == [30]
    assert loader.batches_per_epoch == 7
    for epoch in range(3):
        _, targets = loader.rows(30 * epoch, 30)
        assert sorted(targets.flatten().tolist()) == list(range(1, 16 * 30 + 1))


def test_epochs_differ_in_order() -> None:
    loader = Loader(counting(16 * 30 + 1), batch_size=30, seq_len=16, seed=3)
    assert not torch.equal(loader.batch(0)[0], loader.batch(1)[0])


def test_a_fresh_loader_goes_on_exactly_where_another_stopped() -> None:
    def loader() -> Loader:
        return Loader(counting(1000), batch_size=8, seq_len=16, seed=1)

    first = loader()
    uninterrupted = [first.batch(step)[0] for step in range(20)]
    assert torch.equal(loader().batch(13)[0], uninterrupted[13])
    assert torch.equal(loader().batch(7)[0], uninterrupted[7])


def test_a_batch_across_the_end_of_an_epoch_is_that_of_its_rows() -> None:
    loader = Loader(counting(16 * 5 + 1), batch_size=12, seq_len=16, seed=1)
    batch, _ = loader.batch(1)
    rows = [loader.rows(position, 1)[0] for position in range(12, 24)]
    assert torch.equal(batch, torch.cat(rows))


def test_ranks_and_microbatches_split_the_batch_that_one_process_sees() -> None:
    loader = Loader(counting(5000), batch_size=8, seq_len=16, seed=1)
    whole, _ = loader.batch(3)
    parts = [loader.rows(3 * 8 + start, 2)[0] for start in (0, 2, 4, 6)]
    assert torch.equal(torch.cat(parts), whole)


def test_differing_seeds_differ() -> None:
    first, second = (
        Loader(counting(5000), batch_size=8, seq_len=16, seed=seed).batch(0)[0] for seed in (0, 1)
    )
    assert not torch.equal(first, second)


def test_a_single_sequence_is_shown_again_and_again() -> None:
    loader = Loader(counting(17), batch_size=3, seq_len=16, seed=0)
    assert loader.batch(0)[0].tolist() == [list(range(16))] * 3


def test_ids_beyond_the_vocabulary_are_refused_where_they_appear() -> None:
    tokens = TokenArray(np.array([1, 2, 3, 9, 1], dtype=np.uint16), vocab_size=9, name="train")
    with pytest.raises(DataError, match="token id 9, but the vocabulary has 9 ids"):
        Loader(tokens, batch_size=1, seq_len=4, seed=0).batch(0)


def test_tokens_shorter_than_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="16 train tokens: a sequence needs seq_len\\+1 = 17"):
        Loader(counting(16), batch_size=1, seq_len=16, seed=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        Loader(counting(100), batch_size=0, seq_len=16, seed=0)


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
        tuple(permute(np.arange(64), 64, seed=seed, epoch=epoch).tolist())
        for seed in range(8)
        for epoch in range(8)
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


def loader(vocab_size: int = 1000) -> Loader:
    return Loader(
        TokenArray(np.arange(1000, dtype=np.uint32), vocab_size=vocab_size, name="train"),
        batch_size=4,
        seq_len=16,
        seed=1,
    )


def test_rows_are_the_loaders_in_any_order() -> None:
    feed = Feed(loader(), CPU)
    plain = loader()
    for first, count, then in (
        (0, 4, 4),
        (4, 4, 8),
        (2, 4, 6),
        (6, 2, None),
        (6, 4, 10),
        (10, 4, None),
    ):
        for got, wanted in zip(
            feed.rows(first, count, then=then), plain.rows(first, count), strict=True
        ):
            assert torch.equal(got, wanted)
    feed.close()


def test_the_next_rows_are_read_by_another_thread_and_once() -> None:
    source = loader()
    calls = []
    original = source.rows

    def rows(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((first, threading.current_thread().name))
        return original(first, count)

    source.rows = rows  # type: ignore[method-assign]
    feed = Feed(source, CPU)
    feed.rows(0, 4, then=4)
    feed.rows(4, 4)
    feed.close()
    assert calls == [(0, "MainThread"), (4, "feed_0")]


def test_what_is_wrong_with_rows_is_told_where_they_are_asked_for() -> None:
    feed = Feed(loader(vocab_size=1), CPU)
    with pytest.raises(DataError, match="positions 0 … 3"):
        feed.rows(0, 4)
    good = loader()
    feed = Feed(good, CPU)
    feed.rows(0, 4, then=4)
    feed.close()
    feed = Feed(good, CPU)
    feed.rows(0, 4, then=4)
    object.__setattr__(good.tokens, "vocab_size", 1)
    with pytest.raises(DataError, match="positions 8 … 11"):
        feed.rows(8, 4)
    feed.close()


def test_no_thread_is_left() -> None:
    feed = Feed(loader(), CPU)
    feed.rows(0, 4, then=4)
    feed.close()
    for thread in threading.enumerate():
        if thread.name.startswith("feed"):
            thread.join(PATIENCE)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def test_rows_for_a_gpu_are_page_locked_and_copied_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From pageable memory a copy waits for the host; the calls are recorded where there is no
    GPU.
    """
    calls: list[str] = []

    def pin(rows: torch.Tensor) -> torch.Tensor:
        calls.append("pin")
        return rows

    def to(rows: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        calls.append(f"to {device}, non_blocking={non_blocking}")
        return rows

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    feed = Feed(loader(), torch.device("cuda"))
    feed.rows(0, 4)
    feed.close()
    assert calls == ["pin", "pin", "to cuda, non_blocking=True", "to cuda, non_blocking=True"]
