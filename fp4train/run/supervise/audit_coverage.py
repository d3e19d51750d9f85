"""The layers of a run that no audit compares, and what audits of the others leave out, by the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from fp4train.audit.observe import partly_uncovered, why_not_observed
from fp4train.config import Config
from fp4train.nn.executors import executor_class
from fp4train.parallel.config import Mesh
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.run.supervise.planned_calls import BY_WEIGHT
from fp4train.text import counted, first_few


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
