"""Rows fetched in advance are the rows that the loader gives."""

import threading

import numpy as np
import pytest
import torch

from fp4train.data import DataError, Loader, TokenArray
from fp4train.data.feed import Feed

CPU = torch.device("cpu")


def loader(vocab_size: int = 1000) -> Loader:
    return Loader(
        TokenArray(np.arange(1000, dtype=np.uint32), vocab_size=vocab_size, name="train"),
        batch_size=4,
        seq_len=16,
        seed=1,
    )


def test_rows_are_the_loaders_in_any_order() -> None:
    feed, plain = Feed(loader(), CPU), loader()
    for first, count, then in ((0, 4, 4), (4, 4, 8), (2, 4, 6), (6, 2, None), (6, 4, 10), (10, 4, None)):
        for got, wanted in zip(feed.rows(first, count, then=then), plain.rows(first, count), strict=True):
            assert torch.equal(got, wanted)
    feed.close()


def test_the_next_rows_are_read_by_another_thread_and_once() -> None:
    source, calls = loader(), []
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
            thread.join(5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def test_rows_for_a_gpu_are_page_locked_and_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory a copy waits for the host; the calls are recorded where there is no GPU."""
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
