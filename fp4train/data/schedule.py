"""Which part of the data each position of a run takes its sequence from, and which of the part's.

A stage gives the parts their shares from one position on, up to where the next one begins. A cycle
of it is as many positions as its shares add up to, c of them for a part of share c: its k-th lies
where (k + u)/c, 0 ≤ u < 1, stands among those of all parts, with u from the seed, part and k. So
the parts are spread evenly: of n parts every stretch of a stage has each in its share, but for
fewer than 2 (n − 1) sequences.

A part goes on in each stage where the one before left it: what it gave until then has a closed
form, so that a position needs the cycles alone, whatever was asked for before.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fp4train.data.stored import Places
from fp4train.data.stream import ENDLESS
from fp4train.errors import DataError

MASK64 = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """One 64-bit value from another, well mixed (Steele et al. 2014)."""
    z = (value + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def mix(half: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """As `splitmix64`, of an array xor `key`."""
    z = half ^ np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def first_steps(starts: Iterable[int | float], steps: int) -> list[int]:
    """The first step of each stage of a run of so many steps.

    Args:
        starts: steps, or shares of the run, as `data.stages` has them.

    Raises:
        DataError: they are not in order.
    """
    first: list[int] = []
    for number, start in enumerate(starts):
        step = start if isinstance(start, int) else round(start * steps)
        if first and step <= first[-1]:
            raise DataError(
                f"data.stages[{number}].start={start} is step {step}, and the stage "
                f"before it begins at step {first[-1]}: each begins later than the one before"
            )
        first.append(step)
    return first


class PartStage:
    """The sequences at the positions from `first` on.

    Args:
        shares: positions of each part in a cycle.
        before: sequences of each part at the positions before `first`.
    """

    def __init__(self, first: int, shares: tuple[int, ...], before: Places, seed: int) -> None:
        self.first = first
        self.shares = np.array(shares)
        self.before = before
        state = splitmix64(seed & MASK64)
        turns = [np.arange(share) for share in shares]
        when = [
            (turn + mix(turn.astype(np.uint64), splitmix64(state + i)) / 2**64) / len(turn)
            for i, turn in enumerate(turns)
        ]
        order = np.argsort(np.concatenate(when), kind="stable")
        self.parts = np.repeat(np.arange(len(shares)), shares)[order]
        """The part at each position of a cycle."""
        self.turns = np.concatenate(turns)[order]
        """The positions of the same part that come before it in the cycle."""

    def taken(self, position: int) -> Places:
        """The sequences of each part at the positions before this one of the stage."""
        cycles, rest = divmod(position - self.first, len(self.parts))
        of_rest = np.bincount(self.parts[:rest], minlength=len(self.shares))
        taken: Places = self.before + cycles * self.shares + of_rest
        return taken

    def at(self, positions: Places) -> tuple[Places, Places]:
        """The parts at positions of the stage, and the numbers of their sequences."""
        cycles, places = np.divmod(positions - self.first, len(self.parts))
        parts = self.parts[places]
        return parts, self.before[parts] + cycles * self.shares[parts] + self.turns[places]


class PartSchedule:
    """The sequences of all parts by positions; a pure function of the seed and the stages.

    Args:
        stages: (first position, shares of the parts), in the order of the positions, from 0 on.
    """

    def __init__(self, stages: Iterable[tuple[int, tuple[int, ...]]], seed: int) -> None:
        self.stages: list[PartStage] = []
        for first, shares in stages:
            before = self.stages[-1].taken(first) if self.stages else np.zeros(len(shares), int)
            self.stages.append(PartStage(first, shares, before, seed))

    def stage(self, position: int) -> PartStage:
        """The stage that a position lies in."""
        return next(stage for stage in reversed(self.stages) if stage.first <= position)

    def at(self, first: int, count: int) -> tuple[Places, Places]:
        """The parts at positions first … first+count-1, and the numbers of their sequences from 0
        on.
        """
        positions = np.arange(first, first + count, dtype=np.int64)
        parts, numbers = np.empty((2, count), np.int64)
        for stage in self.stages:
            now = slice(max(stage.first - first, 0), None)
            parts[now], numbers[now] = stage.at(positions[now])
        return parts, numbers

    def position(self, part: int, number: int) -> int:
        """The position that has a part's sequence of this number; `ENDLESS`: none."""
        stage = next(stage for stage in reversed(self.stages) if stage.before[part] <= number)
        if not stage.shares[part]:
            return ENDLESS
        cycles, turn = divmod(number - int(stage.before[part]), int(stage.shares[part]))
        place = int(np.flatnonzero(stage.parts == part)[turn])
        return stage.first + cycles * len(stage.parts) + place
