"""The checkpoints of a run, as its loop asks for them (`saving.Saver` writes them), and how each
turned out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one checkpoint: written, or why not.

    Args:
        step: optimizer steps done at it.
        problem: why it could not be written; None if it was.
        bad: the tensor that is not finite, in which case nothing was written.
    """

    step: int
    problem: str | None = None
    bad: str | None = None

    @property
    def written(self) -> bool:
        return self.problem is None and self.bad is None


class Checkpoints(Protocol):
    """The checkpoints of one run, which are written while the next steps run.

    Attributes:
        saved: newest step that is written; None: none is.
        good: newest step whose state gave a loss within its past.
        named: the good one when the loss last diverged.
        resumed: the step that the run goes on from, which stays until a later one is good; 0: it
            begins, or that state is doubtful.
    """

    saved: int | None
    good: int | None
    named: int | None
    resumed: int

    def due(self, step: int) -> bool:
        """Whether a checkpoint that failed should be tried again after `step` steps."""

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of `step` is written or being written."""

    def expect(self, sums: Mapping[str, int]) -> None:
        """The copy of the coming checkpoint must have these sums of bits, by tensor."""

    def begin(self, *, proven: bool = False, doubt: str | None = None) -> bool:
        """Begin the checkpoint of the current step; False if the one before is not done in time."""

    def prove(self, step: int) -> None:
        """A loss within its past has been computed from the state of `step`."""

    def set_doubt(self, since: int, doubt: str | None) -> None:
        """Mark the checkpoints from step `since` on as doubtful; None: take the marks away."""

    def outcomes(self) -> list[Outcome]:
        """The outcomes since the last call."""

    def wait(self) -> None:
        """Wait, within bounds, until nothing is being written."""

    def close(self) -> None:
        """End the writing."""
