"""Which rank the others wait for: each gives a sign in the store every few seconds, and one watches
the signs.

A rank that is stopped (a debugger, SIGSTOP, a machine that swaps or is cut off) ends nothing by
itself: the others wait in a collective, up to `parallel.timeout`. Rank 0 says meanwhile who gives
no sign, and rank 1 says so of rank 0. A rank whose threads live and whose step hangs gives its
signs: `train.step_timeout` finds it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

from torch.distributed import DistStoreError

BEAT_SECONDS = 5.0
"""Between two signs of a rank."""
SILENT_SECONDS = 30.0
"""Without a sign, after which a rank is named."""

_log = logging.getLogger(__name__)


class Attendance:
    """The signs of the ranks, as one rank gives and sees them.

    Args:
        rank: this one. size: how many there are.
        store: a connection of its own, for one that waits answers nothing else; every rank has
            given its first sign.
        named: ranks in words, with their machines.
        timeout: seconds that a collective waits.
    """

    def __init__(
        self, rank: int, size: int, store: Any, named: Callable[[list[int]], str], timeout: float
    ) -> None:
        self.rank = rank
        self.store = store
        self.named = named
        self.timeout = timeout
        self.watched = range(1, size) if rank == 0 else range(1) if rank == 1 else range(0)
        self._signs: dict[int, bytes] = {}
        self._heard_at = dict.fromkeys(self.watched, time.monotonic())
        self._silent_since: dict[int, float] = {}

    def start(self) -> None:
        """Give signs, and watch those of others, in threads that end with the process."""
        Thread(target=self._give_signs, name="signs", daemon=True).start()
        if self.watched:
            Thread(target=self._watch, name="attendance", daemon=True).start()

    @staticmethod
    def sign(store: Any, rank: int, count: int) -> None:
        """Give a sign: another number than before."""
        store.set(f"sign/{rank}", str(count))

    def _give_signs(self) -> None:
        self.store.set_timeout(timedelta(days=365))
        count = 0
        while True:
            count += 1
            try:
                self.sign(self.store, self.rank, count)
                self._hear(
                    self.store.multi_get([f"sign/{rank}" for rank in self.watched])
                    if self.watched
                    else []
                )
            except DistStoreError:  # late
                pass
            except RuntimeError:  # the store is gone, and the job ends
                return
            time.sleep(BEAT_SECONDS)

    def _hear(self, signs: Sequence[bytes]) -> None:
        for rank, sign in zip(self.watched, signs, strict=True):
            if self._signs.get(rank) != sign:
                self._signs[rank] = sign
                self._heard_at[rank] = time.monotonic()

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while True:
            time.sleep(BEAT_SECONDS)
            now = time.monotonic()
            if now - looked_at > 2 * BEAT_SECONDS:  # this process was stopped, and heard nobody
                self._heard_at = dict.fromkeys(self.watched, now)
            looked_at = now
            self._say(now)

    def _say(self, now: float) -> None:
        """Name the ranks that have become silent, in one line, and those that are back."""
        back = [rank for rank, since in self._silent_since.items() if self._heard_at[rank] > since]
        for rank in back:
            seconds = self._heard_at[rank] - self._silent_since.pop(rank)
            self._tell("%s gives signs again, after %.0f s", self.named([rank]), seconds)
        silent = [rank for rank in self.watched if now - self._heard_at[rank] > SILENT_SECONDS]
        if fresh := [rank for rank in silent if rank not in self._silent_since]:
            self._silent_since |= {rank: self._heard_at[rank] for rank in fresh}
            self._tell(
                "%s: no sign for %.0f s (stopped, or its machine cannot be reached); the "
                "others wait for it, up to "
                "parallel.timeout=%g s",
                self.named(fresh),
                now - min(self._heard_at[rank] for rank in fresh),
                self.timeout,
            )

    def _tell(self, message: str, *values: object) -> None:
        """Log a line; of the ranks other than 0, which log errors alone, as one."""
        _log.log(logging.ERROR if self.rank else logging.WARNING, message, *values)
