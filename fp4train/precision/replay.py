"""What layers take from the context in a region that is recomputed: a record of the first pass,
handed out again in the second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar, cast

T = TypeVar("T")
ReplayRecord = dict[object, list[object]]
"""Owner (a layer) → the values that it took, in turn."""


class Replay(NamedTuple):
    """The recomputed regions around a call.

    records: those of the regions that run for the first time, which the values enter.
    values: the values of the first pass, by owner; None: nothing is recomputed.
    """

    records: tuple[ReplayRecord, ...] = ()
    values: Mapping[object, Iterator[object]] | None = None

    def recorded(self, record: ReplayRecord) -> Replay:
        """The same inside of one more region, which runs for the first time."""
        return Replay((*self.records, record), self.values)

    def once(self, owner: object, make: Callable[[], T]) -> T:
        """`make()`; where a region is recomputed, the value that the same call of `owner` made in
        the first pass.
        """
        if self.values is None:
            value = make()
        else:
            value = cast(T, next(self.values[owner]))
        for record in self.records:
            record.setdefault(owner, []).append(value)
        return value


def replay_of(record: ReplayRecord) -> Replay:
    """The second pass of a region, whatever is around it: the outer regions have ended, or are
    being recomputed around this one.
    """
    return Replay(values={owner: iter(values) for owner, values in record.items()})


NO_REPLAY = Replay()
