"""The sequences of an evaluation, each once, in forward passes of equal shape.

The loss of an evaluation is that per target that counts, whatever the rows R of a pass are. Where
fewer than R sequences are left, as many as divide R are repeated until they fill a pass: the mean
loss of the pass is theirs, and no kernel, compiled block or stage of a pipeline sees another shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fp4train.data.stream import ENDLESS, Rows, Stream
from fp4train.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward passes of `rows` rows over the first sequences of `loader`.

    Args:
        batches: most batches of `loader` that are read; None: as many sequences as there are before
            one is shown again.
    """

    loader: Stream
    rows: int
    batches: int | None

    @property
    def sequences(self) -> int:
        """The number of sequences that are read.

        Raises:
            UserError: all are to be read, and nobody knows how many there are.
        """
        if self.batches is None:
            if self.loader.fresh == ENDLESS:
                raise UserError(
                    f"{self.loader.place} have no known length: give batches=…, the number of "
                    "batches to be read"
                )
            return self.loader.fresh
        return min(self.loader.fresh, self.batches * self.loader.batch_size)

    @cached_property
    def parts(self) -> Sequence[range]:
        """The sequences of each pass."""
        parts = []
        start = 0
        while start < self.sequences:
            size = min(self.rows, self.sequences - start)
            while self.rows % size:
                size -= 1
            parts.append(range(start, start + size))
            start += size
        return parts

    @cached_property
    def targets(self) -> Sequence[int]:
        """The number of targets that count in each pass, those that are repeated once."""
        return [self.loader.scored(part.start, len(part)) for part in self.parts]

    def read(self, number: int) -> Rows:
        """Inputs and targets of pass `number`."""
        part = self.parts[number]
        copies = self.rows // len(part)
        tokens, targets = self.loader.rows(part.start, len(part))
        return tokens.repeat(copies, 1), targets.repeat(copies, 1)

    def weight(self, number: int) -> float:
        """Factor of the mean loss over all tokens of pass `number`: the mean of the products is the
        loss per target that counts; 1 where all count and all passes are full.
        """
        tokens = len(self.parts) * len(self.parts[number]) * self.loader.seq_len
        counted = sum(self.targets)
        return tokens / counted if counted else 0.0
