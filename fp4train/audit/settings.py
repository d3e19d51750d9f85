"""When a run audits itself, and what it does about a fault."""

from __future__ import annotations

from dataclasses import dataclass

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
        sums: steps from one comparison of the sums of bits to the next: the state after an update
            with that before the next step, and copies of it with each other; 0: never.
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
