"""Where ranks meet, and where the first one that fails leaves its word: a store, kept by torchrun's agent or by rank 0.

Each rank says that it is there, and the others wait for it, for a time: one that does not come is named. A rank that
fails leaves its word and its exit code. A thread of every other rank hears it and ends that rank with the same code,
whatever it waits for. Ranks that lose others without a word count who is left, and name who is not.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn, TypeVar

from torch.distributed import DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fp4train.errors import LostError
from fp4train.parallel.launch import Place

T = TypeVar("T")

PATIENCE = 300.0
"""Seconds that ranks wait for each other before they meet, if `parallel.timeout` is not shorter."""
GRACE = 4.0
"""Seconds in which ranks that lose another one tell each other so."""
_UNWINDING = 10.0
"""Seconds that a rank has to end by itself after another one gave its word."""
_HEARD = 0.5
"""Seconds after which all ranks have heard a word."""
_WORD = "word"


class Meeting:
    """The store, as one rank sees it.

    Args:
        store: whose keys this attempt alone reads.
        listening: another connection to it: one that waits for a key answers nothing else.
        keeps: whether it ends with this rank.
    """

    def __init__(self, place: Place, store: Any, listening: Any, *, keeps: bool) -> None:
        self.place, self.store, self.keeps = place, store, keeps
        self.hosts: list[str] = []
        """Of the ranks, once they have met."""
        self.heard: str | None = None
        """The first word that a rank gave: its exit code and what it said."""
        self._own: str | None = None
        self._ear = Thread(target=self._listen, args=(listening,), daemon=True)
        self._ear.start()

    @classmethod
    def join(cls, place: Place, timeout: float) -> Meeting:
        """Meet the other ranks.

        Args:
            timeout: seconds that later calls of the store may take.

        Raises:
            LostError: a rank does not come within `PATIENCE`, or `timeout`.
        """
        # torchrun's agent keeps the store itself; elsewhere rank 0 does. An attempt does not read the keys of the one
        # before.
        keeps = place.lead and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience, where, address = min(timeout, PATIENCE), f"{place.address}:{place.port}", str(place.address)
        bound, everyone = timedelta(seconds=patience), [f"here/{rank}" for rank in range(place.size)]
        try:
            stores = [
                PrefixStore(
                    f"fp4train/{place.attempt}",
                    TCPStore(address, place.port, None, own, bound, wait_for_workers=False),
                )
                for own in (keeps, False)
            ]
        except RuntimeError as error:
            text = f"rank {place.rank} of {place.size} does not reach rank 0 at {where} within {patience:g} s: {error}"
            speaks = place.rank == 1 or place.local_rank == 0
            raise LostError(text.splitlines()[0], speaks=speaks) from error
        found = cls(place, *stores, keeps=keeps)
        try:
            found.store.set(everyone[place.rank], socket.gethostname())
            found.store.wait(everyone, bound)
            found.hosts = [host.decode() for host in found.store.multi_get(everyone)]
        except RuntimeError as error:
            absent = found._named(_within(GRACE, lambda: found._without("here"), [0]))
            text = f"{absent} did not come to {where} within {patience:g} s: not started, or ended before the ranks met"
            raise LostError(text, speaks=found.say(LostError.exit_code, text)) from error
        found.store.set_timeout(timedelta(seconds=timeout))
        return found

    def say(self, code: int, word: str) -> bool:
        """Leave this rank's last word; whether it is the first, which is to be printed."""
        self._own = f"{code} {word}"
        first = _within(GRACE, lambda: str(self.store.compare_set(_WORD, "", self._own).decode()), None)
        if first is None:  # the store is gone, and rank 0 with it: one rank per machine speaks
            self._ear.join(GRACE)
            return self.heard is None and (self.place.rank == 1 or self.place.local_rank == 0)
        self.heard = first
        return first == self._own

    @property
    def code(self) -> int:
        """The exit code of the first word; 0: none was heard."""
        return 0 if self.heard is None else int(self.heard.partition(" ")[0])

    def lost(self) -> str | None:
        """The names of the ranks that are not there any more, "" if all are; None: one of them gave a word."""
        if self.heard is not None:
            return None
        keeper: list[int] | None = [0]  # a store that does not answer is that of rank 0
        silent = _within(2 * GRACE, self._silent, keeper)
        return None if silent is None or self.heard is not None else self._named(silent)

    def leave(self, code: int) -> NoReturn:
        """End this process; if the store ends with it, when the others have heard a word, or have ended."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if self.keeps:
            time.sleep(_HEARD if code else _HEARD / 5)
        os._exit(code)

    def _silent(self) -> list[int] | None:
        """The ranks that do not say that they lost one; None: a word was given."""
        self.store.set(f"lost/{self.place.rank}", "")
        with suppress(DistStoreError):  # no word in that time
            self.store.wait([_WORD], timedelta(seconds=GRACE))
            self.heard = self.store.get(_WORD).decode()
            return None
        return self._without("lost")

    def _without(self, what: str) -> list[int]:
        return [rank for rank in range(self.place.size) if not self.store.check([f"{what}/{rank}"])]

    def _named(self, ranks: list[int]) -> str:
        """ "rank 3 on gpu07", "ranks 1, 2, 3, 4 and 12 others"."""
        if len(ranks) == 1:
            return f"rank {ranks[0]}" + (f" on {self.hosts[ranks[0]]}" if self.hosts else "")
        others = f" and {len(ranks) - 4} others" if len(ranks) > 4 else ""
        return f"ranks {', '.join(map(str, ranks[:4]))}{others}" if ranks else ""

    def _listen(self, listening: Any) -> None:
        with suppress(RuntimeError):  # of a store that is gone
            listening.wait([_WORD], timedelta(days=365))
            self.heard = listening.get(_WORD).decode()
            if self.heard != self._own:
                time.sleep(_UNWINDING)
                self.leave(self.code)


def _within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """`ask()`, or `otherwise` if that fails or takes longer: a store whose keeper hangs does not answer."""
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(ask())

    asking = Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else otherwise
