"""All audits of a run: of layers, and of sums of the state (docs/audit.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from fp4train.audits.fault import Fault
from fp4train.audits.start import check_plan
from fp4train.companion import RunCompanion
from fp4train.precision import Recipe
from fp4train.run.queued import Step
from fp4train.run.supervise.audit_report import report
from fp4train.run.supervise.layer_audits import LayerAudits, summary
from fp4train.run.supervise.sums import STATE, StateSums
from fp4train.text import counted

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

PLAN: Final = "the plan"


class RunAudits(RunCompanion):
    """The audits of `run`.

    Attributes:
        layers: audits of layers by the readable reference.
        sums: comparisons of sums of bits.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.layers = LayerAudits(run)
        self.sums = StateSums(run, self.layers.failures)

    def begin(self, run: Run) -> None:
        """Try each distinct quantiser and layer of the plan, before the first step.

        Raises:
            AuditError: one computes otherwise than the reference, and audit.action is "stop".
        """
        self.layers.began = run.step
        if not self.layers.every and not self.sums.every:
            return
        faults: list[Fault] = []
        failures = self.layers.failures
        with failures.guarding(PLAN):
            faults += check_plan(run.course.plan, lambda _: failures.guarding(PLAN))
        self._report(run.step - 1, faults, PLAN)

    @contextmanager
    def around_step(self, run: Run, recipe: Recipe) -> Iterator[None]:
        """A context in which the step that `run.step` is at is queued; it is observed
        where that is due.

        Raises:
            AuditError: the state changed since the last update, and audit.action is "stop".
        """
        faults = self.sums.before_step()
        if self.sums.due(run.step - 1):
            self._report(run.step - 1, faults, STATE)
        shown = run.runner.unrecorded() if self.layers.observes(run.step) else nullcontext()
        with shown, self.layers.observing(), self.sums.observing():
            yield

    def after_step(self, run: Run, step: Step) -> None:
        """Compare what a step that was queued left behind.

        Raises:
            AuditError: there is a fault, and audit.action is "stop".
        """
        if self.sums.due(step.index):
            self._report(step.index, self.sums.after_step(step), STATE)
        self.layers.after_step(run, step)

    def around_hook(self, run: Run) -> AbstractContextManager[None]:
        """What a hook writes is no fault."""
        return self.sums.writing()

    def on_save(self, run: Run) -> None:
        """Let the saver have the sums of the state right after the update, if they were taken."""
        run.saver.expect(self.sums.of_update(run.step))

    def compare_state(self) -> None:
        """Compare the state with that right after the last update, where no step follows.

        Raises:
            AuditError: it changed, and audit.action is "stop".
        """
        if self.sums.every:
            self._report(self.run.step - 1, self.sums.at_end(), STATE)

    def close(self, run: Run, error: BaseException | None) -> None:
        """Say what was audited, at the end of a run.

        Raises:
            AuditError: see `compare_state`.
        """
        if error is not None:
            return
        self.compare_state()
        extents = []
        if self.sums.count:
            extents.append(f"the state was compared after {counted(self.sums.count, 'update')}")
        text = summary(self.layers, extents)
        if text is not None and run.world.lead:
            _log.info("audit: %s", text)

    def _report(self, step: int, faults: list[Fault], compared: str) -> None:
        layers = self.layers
        clean = layers.clean.get(compared, layers.began)
        layers.faults += report(self.run, step, faults, clean)
        if not faults and compared not in layers.failures.reasons:
            layers.clean[compared] = step + 1
