"""When a run audits itself, and what it does about a fault; and which layer it audits in which step:
the layers in turn, the last one twice as often, since a fault in all layers can hide from an inner
one, whose dy the layers above it make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp4train.text import check_choice, check_least

ACTIONS = ("warn", "stop")
CPU = 100
"""Steps between audits on a CPU where none are asked for."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Audits of a run (docs/audit.md). None changes a bit of it.

    Args:
        every: steps from one audit of a layer to the next, layers in turn; 0: never. None: `CPU`
            steps on a CPU, and never on a GPU, where the reference runs on the host.
        sums: steps from one comparison of the sums of bits to the next: the state before a step
            with that before its update, the state after it with that before the next step, and
            copies of it with each other; 0: never.
        action: the answer to a fault: "warn"; "stop", which ends the run without another
            checkpoint.
    """

    every: int | None = None
    sums: int = 10
    action: str = "warn"

    def __post_init__(self) -> None:
        check_least(self, "audit.", "every", "sums", least=0, must="a number of steps, or 0")
        check_choice("audit.action", self.action, ACTIONS)

    def steps(self, device: str) -> int:
        """Steps from one audit of a layer to the next on devices of this type; 0: never."""
        if self.every is not None:
            return self.every
        return CPU if device == "cpu" else 0


T = TypeVar("T")


def due(step: int, every: int) -> bool:
    """Whether a layer is audited in the step of this index, of so many steps one; 0: never."""
    return every > 0 and step % every == min(1, every - 1)


def in_turn(layers: Sequence[T], last: T) -> list[T]:
    """The layers in the order in which they are audited, `last` of them twice."""
    turn = [last, *(layer for layer in layers if layer is not last)]
    turn.insert(len(turn) // 2 + 1, last)
    return turn
