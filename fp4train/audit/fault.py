"""Results of audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

AUDIT = "audit"
AUDIT_FAULT = "audit fault"
"""Events of a run's metrics: a layer was audited; a fault was found."""


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
        hypotheses: faults of a program that give these bits; empty: none of the list does.
        rank: rank that found it; None: it lies between ranks, and none of them is to blame.
    """

    layer: str
    what: str
    gemm: str = ""
    operand: str = ""
    first: tuple[int, ...] = ()
    share: float = 0.0
    hypotheses: tuple[str, ...] = ()
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
        if self.hypotheses:
            text += f"; these bits are those of: {' or '.join(self.hypotheses)}"
        return text

    def values(self) -> dict[str, Any]:
        """The fault as plain data, for a tracker."""
        plain = asdict(self)
        plain["first"] = list(self.first)
        plain["hypotheses"] = list(self.hypotheses)
        return plain


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


def joined(parts: Sequence[Audited]) -> Audited:
    """The audit of a layer from those of the parts of its in features; at least one."""
    return replace(
        parts[0],
        gemms=list(dict.fromkeys(gemm for part in parts for gemm in part.gemms)),
        faults=[fault for part in parts for fault in part.faults],
        uncovered=[reason for part in parts for reason in part.uncovered],
        failures=[reason for part in parts for reason in part.failures],
    )
