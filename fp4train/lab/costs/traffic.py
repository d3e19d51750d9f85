"""What ranks send each other in a step: bytes, seconds, and the seconds that nothing hides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of communication, per step and rank.

    Args:
        link: "NVLink" or "network".
        sent: bytes that the rank sends.
        seconds: of the collectives alone; `exposed`: those that no computation hides.
    """

    name: str
    link: str
    sent: float
    seconds: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Seconds and sent bytes to gather the weights of a block for its forward pass, and again for its backward pass,
    and to reduce their gradients; bytes FSDP copies."""

    gather: float
    gathered: float
    again: float
    gathered_again: float
    reduce: float
    reduced: float
    copied: float


@dataclass(kw_only=True)
class Flow:
    """Sums over the collectives of one kind."""

    sent: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def add(self, times: float, sent: float, seconds: float, exposed: float) -> None:
        self.sent += times * sent
        self.seconds += times * seconds
        self.exposed += times * max(0.0, exposed)

    def named(self, name: str, link: str) -> Collective:
        return Collective(name=name, link=link, sent=self.sent, seconds=self.seconds, exposed=self.exposed)
