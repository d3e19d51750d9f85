"""`fp4train check`: all layers of a run at a checkpoint, audited in one step on its next batch.

The step is computed as the run would compute it, a group of layers observed at a time, and nothing
is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from fp4train.audit.fault import Audited, Fault
from fp4train.audit.loop import AuditReport, audit
from fp4train.audit.start import check_plan
from fp4train.lab.studies.subject import Subject
from fp4train.run.determinism import seed_model
from fp4train.run.run import Run
from fp4train.run.step import eagerly, microbatch_share, step_rows, train_losses

LAYERS: Final = 16
"""Layers whose tensors are kept at the same time."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `fp4train check` found.

    Args:
        audits: result of each layer.
        uncovered: layer → why it was not audited.
        plan: faults of kernels and layers on small random tensors.
    """

    audits: Sequence[Audited]
    uncovered: dict[str, str]
    plan: Sequence[Fault]

    @property
    def faults(self) -> list[Fault]:
        """All faults, those of the plan first."""
        return [*self.plan, *(fault for audited in self.audits for fault in audited.faults)]


def check(subject: Subject) -> Checked:
    """Audit all layers of a subject in the step that it would do next."""
    run = subject.run
    run.apply(run.plan.at(run.step))
    reports = list(_reports(run))
    return Checked(
        audits=[audited for report in reports for audited in report.audits],
        uncovered={name: why for report in reports for name, why in report.uncovered.items()},
        plan=list(check_plan(run.plan)),
    )


def _reports(run: Run) -> Iterator[AuditReport]:
    names = [layer.layer.name for layer in run.linears]
    for start in range(0, len(names), LAYERS):
        yield _audited(run, names[start : start + LAYERS])


def _audited(run: Run, names: Sequence[str]) -> AuditReport:
    """The audits of these layers in the first microbatch of the step."""
    recipe = run.plan.at(run.step).recipe
    model: nn.Module = run.model
    scaling = run.scaling()
    seed_model(run)
    with eagerly(run), audit(model, names) as report:
        losses = train_losses(run, recipe, step_rows(run), run.loss_scale * microbatch_share(run))
        next(losses, None)  # of the first microbatch, with its backward pass
        del losses
    run.optimizer.zero_grad(set_to_none=True)
    run.load_scaling(scaling)
    return report
