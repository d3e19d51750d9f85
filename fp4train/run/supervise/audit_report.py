"""What a run says of its audits: the faults that they found, and whether it goes on; layers that none
compares, those without room in main memory, and audits that failed themselves.

All tensors of an audit are copied to main memory. A layer [N, K] and M tokens take bytes of

    14·N·K + 9·M·K + 10·M·N      for the record of a call, by emulation in NVFP4
    `OTHERS` times as many       in the recipe with the largest records
    4·N·K                        for the weight of the optimizer, of all experts
    8·N·K                        for its gradient and the sum of its dw's, of all experts
    `COMPARING`·max(…)           for the comparison: of N·K, M·K and M·N

Where every step is audited, two layers are observed in each: that of the step, and that of the next
one, whose operands of the step before are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from torch import nn

from fp4train import checkpoint
from fp4train.audits.fault import AUDIT_FAULT, Fault
from fp4train.audits.observe import partly_uncovered, why_not_observed
from fp4train.config import Config
from fp4train.errors import UserError
from fp4train.nn.executors import executor_class
from fp4train.nn.planned import PlannedLayer
from fp4train.parallel.config import Mesh
from fp4train.parallel.world import AgreedError
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.run.host import free_memory
from fp4train.run.record.directory import CHECKPOINTS
from fp4train.run.supervise.planned_calls import BY_WEIGHT
from fp4train.text import counted, first_few, first_line, typed

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

COMPARING: Final = 40
"""Bytes for each element of the largest operand: its codes are made again in float32, and the
product of some rows is computed in float64.
"""
OTHERS: Final = 1.3
"""The most that records of other recipes are larger than those of NVFP4: 1.27 was measured."""
_GIB: Final = 2**30


class Reasons(dict[str, list[str]]):
    """Reason → the names that it is about, each once."""

    def add(self, reason: str, names: Iterable[str]) -> None:
        listed = self.setdefault(reason, [])
        listed += [name for name in names if name not in listed]

    def update_with(self, other: Reasons) -> None:
        """Add the reasons and names of another."""
        for reason, names in other.items():
            self.add(reason, names)

    def told_as(self, heading: str) -> str:
        """The reasons as the end of a sentence: "; HEADING: names (reason); …"."""
        return "".join(
            f"; {heading}: {first_few(names, 3)} ({reason})" for reason, names in self.items()
        )


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The layers of a run that audits cover.

    Args:
        by_weight: names of the layers whose weights other code multiplies, as the model says.
    """

    config: Config
    by_weight: Collection[str]

    @classmethod
    def of(cls, config: Config, model: nn.Module) -> Coverage:
        return cls(config=config, by_weight=getattr(model, "by_weight", ()))

    def why_not(self, plan: LayerPlan) -> str | None:
        """Why a layer of `plan` is not audited; None: it is."""
        layer = plan.layer
        if layer.name in self.by_weight and not plan.quantised:
            return BY_WEIGHT
        if layer.unconverted is not None:
            return f"not a layer of fp4train: {layer.unconverted}"
        if self.config.train.compile and not plan.quantised:
            return "train.compile: the compiler has the products in high precision"
        return why_not_observed(executor_class(plan), plan)

    def left_out(self, stretch: PlannedStretch) -> dict[str, str]:
        """Name of each layer that is not audited in a stretch → the reason."""
        reasons: dict[str, str] = {}
        for name, plan in stretch.layers.items():
            reason = self.why_not(plan)
            if reason is not None:
                reasons[name] = reason
        return reasons

    def uncovered(self, plan: Plan) -> Reasons:
        """The layers that are not audited in some stretch."""
        reasons = Reasons()
        for stretch in plan.stretches:
            for name, reason in self.left_out(stretch).items():
                reasons.add(reason, [name])
        return reasons

    def partly_covered(self, plan: Plan, mesh: Mesh) -> Reasons:
        """What is not compared in the audits of layers, and the layers."""
        reasons = Reasons()
        train = self.config.train
        adds_up = train.batch_size > train.rows(mesh.data) * mesh.data
        for stretch in plan.stretches:
            left_out = self.left_out(stretch)
            for name, layer_plan in stretch.layers.items():
                if name not in left_out:
                    for reason in partly_uncovered(layer_plan, plan.device.type, adds_up=adds_up):
                        reasons.add(reason, [name])
        return reasons

    def described(self, plan: Plan, mesh: Mesh) -> str:
        """A sentence about the audits of a run, for its plan."""
        settings = self.config.audit
        every = settings.steps(plan.device.type)
        extents = ""
        if settings.sums:
            extents += f"; the state is compared every {counted(settings.sums, 'step')}"
        if not every:
            return f"audits: none of layers on {plan.device.type} (audit.every=…){extents}"
        uncovered = self.uncovered(plan)
        layers = {name for stretch in plan.stretches for name in stretch.layers}
        covered = layers.difference(*uncovered.values())
        return (
            f"audits: one of {counted(len(covered), 'layer')} every {counted(every, 'step')}"
            + uncovered.told_as("not covered")
            + self.partly_covered(plan, mesh).told_as("partly covered")
            + extents
        )


def needed(layer: PlannedLayer, tokens: int, observed: int = 1) -> int:
    """Bytes of main memory that the audit of a layer takes in passes of so many tokens.

    Args:
        observed: number of layers of this size that are observed in a step.
    """
    in_features = layer.layer.in_features
    out_features = layer.layer.out_features
    weights = out_features * in_features
    inputs = tokens * in_features
    outputs = tokens * out_features
    record = int(OTHERS * (14 * weights + 9 * inputs + 10 * outputs))
    gathered = (4 + 8) * layer.weight.numel()
    return observed * record + gathered + COMPARING * max(weights, inputs, outputs)


def check_main_memory(layer: PlannedLayer, tokens: int, ranks: int, observed: int = 1) -> None:
    """Check that main memory has room for the audits that the ranks of this machine make at once.

    Args:
        observed: number of layers that are observed in a step, as `needed` has it.

    Raises:
        MemoryError: it has not.
    """
    free = free_memory()
    total = needed(layer, tokens, observed) * ranks
    if free is not None and total > free:
        raise MemoryError(
            f"its audit takes about {total / _GIB:.1f} GiB of main memory, and "
            f"{free / _GIB:.1f} GiB are free"
        )


class AuditFailures:
    """The failures of the audits of `run`, of which the first one is logged.

    Attributes:
        reasons: subject, a layer or a part of the state → why it was not audited.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.reasons: dict[str, str] = {}

    @contextmanager
    def guarding(self, subject: str) -> Iterator[None]:
        """A context of an audit of `subject`: where it fails, that is noted, and nothing ends."""
        try:
            yield
        except Exception as error:
            self.add(subject, first_line(error))

    def add(self, subject: str, reason: str) -> None:
        """Note that `subject` could not be audited."""
        if not self.reasons:
            step = self.run.step + 1
            _log.warning("step %d: the audit of %s failed: %s", step, subject, reason)
            values = {"layer": subject, "reason": reason}
            self.run.record.tracker.log_event(step, "audit failed", values)
        self.reasons.setdefault(subject, reason)


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
            f"checkpoint up to it: resume={typed(run.directory)} resume_step={before[-1]}"
        )
    if not steps:
        return "the run has no checkpoint"
    return (
        f"the state after step {clean} is the last one that was compared without a fault, and all "
        f"checkpoints are from after it: fp4train check {typed(run.directory)} step=… audits one of them"
    )
