"""Batches on the device that trains, fetched before they are asked for.

Reading a batch can wait for a disk, and copying it to a GPU waits for the GPU where the memory is pageable. A thread
fetches the next rows into page-locked memory while the current ones are trained on; the copy then runs beside the
kernels.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fp4train.data.loader import Loader

Rows = tuple[Tensor, Tensor]


class Feed:
    """The rows of `loader` on `device`; as pure a function of the position as the loader's."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._next: tuple[int, int, Future[Rows]] | None = None
        self._waits: tuple[float, int, int] | None = None

    def rows(self, first: int, count: int, *, then: int | None = None) -> Rows:
        """Inputs and targets, int64 [count, T] each, of positions first … first+count-1 of the run.

        Args:
            then: the position that is asked for next, with the same count; None: nothing is fetched in advance.

        Raises:
            UserError: the rows hold ids that the vocabulary lacks.
        """
        ahead, self._next = self._next, None
        self._waits = time.monotonic(), first, count
        fetched = ahead[2].result() if ahead is not None and ahead[:2] == (first, count) else self._fetch(first, count)
        self._waits = None
        if then is not None:
            self._next = (then, count, self._thread.submit(self._fetch, then, count))
        inputs, targets = (rows.to(self.device, non_blocking=True) for rows in fetched)
        return inputs, targets

    def waiting(self) -> tuple[float, str] | None:
        """For how many seconds somebody waits for rows by now, and for which; None: nobody does."""
        if (waits := self._waits) is None:
            return None
        since, first, count = waits
        tokens = self.loader.tokens
        place = getattr(tokens.ids, "filename", None)
        of = f"{tokens.name} tokens" + ("" if place is None else f" of {place}")
        return time.monotonic() - since, f"sequences {first}–{first + count - 1} of the {of}"

    def close(self) -> None:
        """End the thread; `rows` must not be called with `then` afterwards."""
        self._next = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, first: int, count: int) -> Rows:
        rows = self.loader.rows(first, count)
        return (rows[0].pin_memory(), rows[1].pin_memory()) if self.device.type == "cuda" else rows
