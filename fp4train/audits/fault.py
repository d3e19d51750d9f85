"""Results of audits."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from fp4train.audits.bits import Difference

AUDIT = "audit"
AUDIT_FAULT = "audit fault"
"""Events of a run's metrics: a layer was audited; a fault was found."""
SECONDS: Final = 20.0
"""Time that one difference may take to be explained."""

Hypothesis = tuple[str, Callable[[], bool]]
"""The name of a fault, and whether it gives what was seen."""


def first_fitting(hypotheses: Iterable[Hypothesis]) -> str:
    """The name of the first fault that fits, of those that `SECONDS` allow to try; empty: none."""
    ends = time.monotonic() + SECONDS
    for name, fits in hypotheses:
        if time.monotonic() > ends:
            break
        with suppress(Exception):  # a spec may not allow what a fault changes
            if fits():
                return name
    return ""


@dataclass(frozen=True)
class CallFinding:
    """What differs in one comparison.

    Args:
        what: sentence about the difference, without a full stop.
        apart: the elements that differ; None: no single ones do.
        cause: gives the name of the fault of a program that makes it; empty: none is known.
        operand: "x", "w" or "dy"; empty: the product itself.
    """

    what: str
    apart: Difference | None = None
    cause: Callable[[], str] = str
    operand: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A difference between what a layer computed and what its plan says.

    Args:
        layer: name of the layer, or of the tensor.
        gemm: "fprop", "dgrad" or "wgrad"; empty: no single GEMM.
        operand: "x", "w" or "dy"; empty: the product itself.
        what: sentence about the difference, without a full stop.
        first: index of the first element that differs.
        share: share of the elements that differ.
        cause: fault of a program that gives these bits; empty: none of the list does.
        rank: rank that found it; None: it lies between ranks, and none of them is to blame.
    """

    layer: str
    what: str
    gemm: str = ""
    operand: str = ""
    first: tuple[int, ...] = ()
    share: float = 0.0
    cause: str = ""
    rank: int | None = 0

    @property
    def place(self) -> str:
        """Layer, GEMM and operand in words."""
        operand = f"operand {self.operand}" if self.operand else ""
        words = (self.layer, self.gemm, operand)
        return ", ".join(word for word in words if word)

    def __str__(self) -> str:
        text = f"{self.place}: {self.what}"
        if self.first:
            text += f" ({self.share:.2%} of the elements, first at {list(self.first)})"
        if self.cause:
            text += f"; these bits are those of: {self.cause}"
        return text

    def values(self) -> dict[str, Any]:
        """The fault as plain data, for a tracker."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The result of one audit.

    Args:
        layer: name of the layer.
        step: step of the run, from 0.
        gemms: GEMMs that were compared.
        faults: differences; none: everything is equal.
        uncovered: GEMMs or operands that could not be compared, with the reason.
        failures: GEMMs whose comparison failed, with the reason.
    """

    layer: str
    step: int
    gemms: Sequence[str] = ()
    faults: Sequence[Fault] = ()
    uncovered: Sequence[str] = ()
    failures: Sequence[str] = ()

    @property
    def left_out(self) -> list[str]:
        """What was not compared, and why."""
        return [*self.uncovered, *(f"its audit failed: {reason}" for reason in self.failures)]


def joined(parts: Sequence[Audited]) -> Audited:
    """The audit of a layer from those of the parts of its in features; at least one."""
    return replace(
        parts[0],
        gemms=list(dict.fromkeys(gemm for part in parts for gemm in part.gemms)),
        faults=[fault for part in parts for fault in part.faults],
        uncovered=[reason for part in parts for reason in part.uncovered],
        failures=[reason for part in parts for reason in part.failures],
    )
