"""Batches are a pure function of (seed, position)."""

import numpy as np
import pytest
import torch

from fp4train.data import DataError, Loader, TokenArray


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
    assert loader.sequences_per_epoch == 30
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
    first, second = (Loader(counting(5000), batch_size=8, seq_len=16, seed=seed).batch(0)[0] for seed in (0, 1))
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
