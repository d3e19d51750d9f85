"""What a run says of the faults that its audits found, and whether it goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from fp4train import checkpoint
from fp4train.audit.fault import AUDIT_FAULT, Fault
from fp4train.errors import UserError
from fp4train.parallel.world import AgreedError
from fp4train.run.record.directory import CHECKPOINTS
from fp4train.text import counted

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

SHOWN: Final = 3
"""Faults of a step that are logged and recorded; the others are counted."""


class AuditError(AgreedError):
    """An audit found a fault, and audit.action is "stop": nothing more is saved."""


def report(run: Run, step: int, faults: Sequence[Fault], clean: int = 0) -> int:
    """Log the faults of all ranks in a step, and count them; every rank calls this.

    Args:
        clean: optimizer steps done when what was compared last had no fault.

    Raises:
        AuditError: there is one, and audit.action is "stop".
    """
    rank = run.world.place.rank
    shown = [
        fault if fault.rank is None else replace(fault, rank=rank) for fault in foremost(faults)
    ]
    by_rank = run.world.gathered((shown, len(faults), clean))
    count = sum(number for _, number, _ in by_rank)
    if not count:
        return 0
    in_turn = zip_longest(*(rank_faults for rank_faults, *_ in by_rank))
    listed = foremost(fault for place in in_turn for fault in place if fault is not None)
    more = count - len(listed)
    for fault in listed:
        values = fault.values()
        if fault is listed[-1] and more:
            values["more"] = more
        run.record.tracker.log_event(step + 1, AUDIT_FAULT, values)
        if run.world.lead:
            where = ""
            if run.world.size > 1 and fault.rank is not None:
                where = f" on rank {fault.rank}"
            _log.warning("step %d, audit%s: %s", step + 1, where, fault)
    if more and run.world.lead:
        _log.warning("step %d, audit: and %d more", step + 1, more)
    if run.config.audit.action == "stop":
        run.saver.wait()  # for one that is being written
        since = min(clean for _, number, clean in by_rank if number)
        raise AuditError(
            f"step {step + 1}: the audit found {counted(count, 'fault')}: "
            f"{listed[0]}. Nothing more is saved (audit.action=stop); "
            f"{run.world.broadcast(way_back(run, since))}"
        )
    return count


def foremost(faults: Iterable[Fault]) -> list[Fault]:
    """At most `SHOWN` faults, those of different kinds before others of the same."""
    kinds: dict[str, Fault] = {}
    repetitions = []
    for fault in faults:
        if kinds.setdefault(fault.what, fault) is not fault:
            repetitions.append(fault)
    return [*kinds.values(), *repetitions][:SHOWN]


def way_back(run: Run, clean: int) -> str:
    """A sentence about the newest checkpoint of at most `clean` optimizer steps."""
    try:
        steps = checkpoint.steps(run.directory / CHECKPOINTS)
    except (UserError, OSError):
        steps = []
    before = [step for step in steps if step <= clean]
    if before:
        return (
            f"the state after step {clean} is the last one that was compared without a fault; go on "
            "from the newest "
            f"checkpoint up to it: resume={run.directory} resume_step={before[-1]}"
        )
    if not steps:
        return "the run has no checkpoint"
    return (
        f"the state after step {clean} is the last one that was compared without a fault, and all "
        f"checkpoints are from after it: fp4train check {run.directory} step=… audits one of them"
    )
