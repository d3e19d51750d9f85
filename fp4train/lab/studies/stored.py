"""What rank.json and sensitivity.json hold of what is read, bound as a configuration is: a key that
is missing, or whose value has another type, is named by its full name. Keys that nothing reads are
left out.

The files may be somebody else's: every number is one that a figure can have, and every text is
short and shows all of its characters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fp4train.config.binding import bind, known_part
from fp4train.errors import UserError
from fp4train.lab.analysis.figure import plain
from fp4train.lab.studies.findings import Finding
from fp4train.lab.studies.intervals import Estimate
from fp4train.lab.studies.sequential import VERDICTS

LARGEST = 1e100
"""A larger number is none of a study."""
NAME = 300
"""Characters of a text in a study."""

T = TypeVar("T")


def bound(saved: Any, kind: type[T]) -> T:
    """What a study wrote, as an object of class `kind`.

    Raises:
        UserError: a key is missing, or its value has another type or is none of a study.
    """
    record: T = bind(_shown(known_part(saved, kind)), kind, "")
    return record


def _shown(node: Any) -> Any:
    """`node` with texts that can be shown.

    Raises:
        UserError: a number is too large.
    """
    if isinstance(node, Mapping):
        return {plain(key, NAME): _shown(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_shown(item) for item in node]
    if isinstance(node, str):
        return plain(node, NAME)
    if isinstance(node, float) and not abs(node) < LARGEST:
        raise UserError(f"{node} is no number of a study")
    return node


@dataclass(frozen=True, kw_only=True)
class StoredIdentity:
    """What a study is of: `run` is the identity of its run; None: it has none."""

    run: str | None


@dataclass(frozen=True, kw_only=True)
class StoredStudy:
    """What every result holds."""

    identity: StoredIdentity


# -- a sensitivity ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredPoint:
    """A set of units that are kept; see `tradeoff.Point`."""

    macs: float
    nmse: float
    time: float | None


@dataclass(frozen=True, kw_only=True)
class StoredJudgement:
    """What batches say of a policy that they did not choose.

    Args:
        gain: nMSE saved against keeping nothing, batch by batch.
    """

    gain: Estimate


@dataclass(frozen=True, kw_only=True)
class StoredPolicy(StoredPoint):
    """The policy that was chosen.

    Args:
        keep: its patterns.
        measured: its findings, on batches that did not choose it where there are some.
        judged: None: nothing is kept.
    """

    keep: tuple[str, ...]
    measured: Finding
    judged: StoredJudgement | None


# -- a ranking -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredGap:
    """A mean difference and its standard error, in nats per token."""

    mean: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class StoredSettings:
    """How forks are trained: their steps, whose schedule they follow, the learning rate."""

    steps: int
    schedule: str
    lr: float


@dataclass(frozen=True, kw_only=True)
class StoredBase:
    """A checkpoint that forks begin from.

    Args:
        trained: recipe that trained it.
    """

    run: str
    step: int
    trained: str
    settings: StoredSettings

    def __str__(self) -> str:
        return plain(f"{self.run}, step {self.step}, trained in {self.trained}", NAME)


@dataclass(frozen=True, kw_only=True)
class StoredCandidate:
    """One candidate.

    Args:
        asked: the command names it.
        group: letters of the groups that it belongs to.
        diverged: problems that ended its forks.
        spikes: places at which forks of it spiked, in words.
        gap, gap_high: gap to the reference's loss, evaluated in the recipe and in high precision.
        gaps: the gap at each checkpoint.
    """

    name: str
    asked: bool
    group: str | None
    diverged: tuple[str, ...]
    spikes: tuple[str, ...]
    gap: StoredGap | None = None
    gap_high: StoredGap | None = None
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoredPair:
    """Two candidates; see `sequential.Pair`.

    Args:
        together: the interval that holds together with those of all other pairs.
    """

    first: str
    second: str
    p: float
    together: tuple[float | None, float | None]
    verdict: str

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"its verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")

    def interval(self, reference: str) -> tuple[float, float] | None:
        """The interval of the other candidate's gap to `reference`; None: it is not known."""
        low, high = self.together
        if low is None or high is None:
            return None
        return (low, high) if self.first == reference else (-high, -low)


# -- a gate ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredGateBase:
    """A checkpoint of a gate."""

    run: str
    step: int
    mean: float | None
