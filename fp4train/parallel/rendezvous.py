"""The round in which all ranks of a run meet at a store.

A store may outlive a round, and each torchrun counts the restarts of its own machine alone, so that
no variable names the round (pytorch#108158). So every rank comes with a word of its own. Rank 0
answers all of them with the name of a round. It gives another name if a word changes: the one that
it had read was left by a rank that has ended.
"""

import socket
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch.distributed import DistStoreError

PREFIX = "fp4train"
"""Of all keys in the store."""
_LOOK = timedelta(seconds=1)
"""Time after which a rank that waits looks whether the round has changed."""


class Round:
    """A round, as one rank sees it.

    Args:
        rank, size: place of this process, and the number of all.
        store: has a prefix that all rounds share.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.store = store
        self.name: str | None = None
        """Prefix of the keys that no other round has; None: rank 0 has not answered."""
        self._ranks = range(size)
        self._word = uuid4().hex.encode()
        self._answered: list[bytes] = []

    def meet(self, seconds: float) -> list[str]:
        """The host names of all ranks, once they are there.

        Raises:
            DistStoreError: one of them has not come within `seconds`.
        """
        deadline = time.monotonic() + seconds
        self.store.set(f"came/{self.rank}", self._word)
        while not (self._lead() if self.rank == 0 else self._follow()):
            if time.monotonic() > deadline:
                raise DistStoreError(f"a rank did not come within {seconds:g} s")
        return [host.decode() for host in self.store.multi_get(self._keys(f"{self.name}/here"))]

    def absent(self) -> list[int]:
        """The ranks that have not come; rank 0, if it alone has not answered."""
        keys = self._keys("came" if self.name is None else f"{self.name}/here")
        return [rank for rank in self._ranks if not self.store.check([keys[rank]])] or [0]

    def _keys(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in self._ranks]

    def _waited(self, keys: list[str]) -> bool:
        """Whether all keys are there soon."""
        try:
            self.store.wait(keys, _LOOK)
        except DistStoreError:
            return False
        return True

    def _lead(self) -> bool:
        """Answer the words that are there; whether all ranks have come under the answer."""
        if not self._waited(self._keys("came")):
            return False
        words = self.store.multi_get(self._keys("came"))
        if words != self._answered:
            self._answered = words
            self.name = uuid4().hex
            answers = [f"{word.decode()} {self.name}" for word in words]
            self.store.multi_set(self._keys("round"), answers)
            self._come()
        if not self._waited(self._keys(f"{self.name}/here")):
            return False
        self.store.set(f"{self.name}/complete", "")
        return True

    def _follow(self) -> bool:
        """Come under the answer to this rank's word; whether all others have."""
        if not self._waited([f"round/{self.rank}"]):
            return False
        word, name = self.store.get(f"round/{self.rank}").decode().split()
        if word != self._word.decode():
            time.sleep(_LOOK.total_seconds() / 20)
            return False
        if name != self.name:
            self.name = name
            self._come()
        return self._waited([f"{name}/complete"])

    def _come(self) -> None:
        self.store.set(f"{self.name}/here/{self.rank}", socket.gethostname())
