"""Which layer is audited in which step: the layers in turn, the last one twice as often, since a
fault in all layers can hide from an inner one, whose dy the layers above it make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def due(step: int, every: int) -> bool:
    """Whether a layer is audited in the step of this index, of so many steps one; 0: never."""
    return every > 0 and step % every == min(1, every - 1)


def in_turn(layers: Sequence[T], last: T) -> list[T]:
    """The layers in the order in which they are audited, `last` of them twice."""
    turn = [last, *(layer for layer in layers if layer is not last)]
    turn.insert(len(turn) // 2 + 1, last)
    return turn
