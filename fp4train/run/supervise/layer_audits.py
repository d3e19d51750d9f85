"""Audits of a run: of one layer every `audit.every` steps, by the readable reference.

Layers are audited in turn, the last one that is quantised twice as often: a fault in all layers can
hide from an inner one, whose dy is made by the layers above it. All ranks audit at the same steps,
each a layer that it holds, with its own tokens. Where ranks share the rows of a weight, the whole
weight is gathered from what their optimizers hold, and compared with what came over the wire.

An audit that fails itself is logged once, and never ends the run. Before a collective of the ranks
of a layer all agree that each takes part in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp4train.audits.call import ObservedCall
from fp4train.audits.exchange import exchange
from fp4train.audits.fault import AUDIT, Audited
from fp4train.audits.observe import Observer
from fp4train.audits.settings import due, in_turn
from fp4train.nn.planned import PlannedLayer
from fp4train.run.queued import Step
from fp4train.run.supervise.audit_report import (
    AuditFailures,
    Coverage,
    Reasons,
    check_main_memory,
    report,
)
from fp4train.run.supervise.planned_calls import (
    PlannedCalls,
    check_room,
    fused_amaxes,
    fused_layers,
    weight_of,
)
from fp4train.run.supervise.updates import UpdateAudit
from fp4train.text import counted

if TYPE_CHECKING:
    from fp4train.run.run import Run


class LayerAudits:
    """The audits of the layers that one rank holds.

    Attributes:
        audited: names of the layers that were audited, on any rank.
        count: number of audits, of all ranks; those of one layer in a step count as one.
        bypassed: layers that could not be audited in their turn → why.
        partly: layers of which an audit compared only a part.
        faults: number of faults found, of all ranks.
        failures: audits that failed themselves.
        clean: layer, or kind of comparison → optimizer steps done when it last had no fault.
        began: optimizer steps done when the audits began.
        seconds: time that the comparisons took.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.every = run.config.audit.steps(run.device.type)
        self.audited: set[str] = set()
        self.bypassed: dict[str, str] = {}
        self.partly = Reasons()
        self.coverage = Coverage.of(run.config, run.model)
        self.faults = 0
        self.count = 0
        self.seconds = 0.0
        self._observers: dict[str, Observer] = {}
        self._earlier: dict[str, list[ObservedCall]] = {}
        self._weight: Tensor | None = None
        self._fused: Tensor | None = None
        self._update: UpdateAudit | None = None
        self._planned = PlannedCalls(run)
        self.failures = AuditFailures(run)
        self.clean: dict[str, int] = {}
        self.began = 0

    def due(self, step: int) -> bool:
        """Whether a layer is audited in the step of this index."""
        return due(step, self.every)

    def layer_at(self, step: int) -> PlannedLayer | None:
        """The layer that is audited in a step; None: this rank has none that can be."""
        turn = self._turn(step)
        return turn[step // self.every % len(turn)] if turn else None

    def microbatch_at(self, step: int) -> int:
        """The microbatch of which a layer is audited in a step: another one in each turn, but the
        first one of a layer whose amaxes it measures for the others.
        """
        layer = self.layer_at(step)
        if layer is not None and self._planned.takes_first(layer, step):
            return 0
        turns, place = divmod(step // self.every, len(self._turn(step)))
        calls = (
            self._planned.microbatches if layer is None else len(self._planned.begins(layer.layer))
        )
        return (turns + place) % calls

    def _turn(self, step: int) -> list[PlannedLayer]:
        """The layers in the order in which they are audited, under the plan of a step."""
        stretch = self.run.course.plan.at(step)
        left_out = self.coverage.left_out(stretch)
        layers = [layer for layer in self.run.planned_layers if layer.layer.name not in left_out]
        if not layers:
            return []
        quantised = [layer for layer in layers if stretch.layers[layer.layer.name].quantised]
        return in_turn(layers, (quantised or layers)[-1])

    def observes(self, step: int) -> bool:
        """Whether a layer is observed in a step: it is audited in it, or in the next one, for which
        this is the one before.
        """
        return any(self.due(at) and self.layer_at(at) is not None for at in (step, step + 1))

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A context of the passes of a step; the layer that is audited in it is observed."""
        step = self.run.step
        self._update = None
        if self.due(step):
            self._take_weight(self.layer_at(step))
        observed: dict[PlannedLayer, Observer] = {}
        for at in (step, step + 1):
            layer = self.layer_at(at) if self.due(at) else None
            if layer is None or layer in observed:
                continue
            with self.failures.guarding(layer.layer.name):
                self._check_main_memory(layer)
                number = self.microbatch_at(at)
                observer = Observer(layer, number, keeps_fused=not self._shares_weights)
                observed[layer] = self._observers[layer.layer.name] = layer.observer = observer
                if at == step:
                    turn = step // self.every
                    self._update = UpdateAudit(self.run, layer, self.failures, turn)
        try:
            with nullcontext() if self._update is None else self._update.observing():
                yield
        finally:
            for layer, observer in observed.items():
                layer.observer = None
                observer.close()

    @property
    def _shares_weights(self) -> bool:
        """Whether other ranks have parts of the weights."""
        mesh = self.run.world.mesh
        return mesh.weight_ranks > 1 or mesh.tensor > 1

    def _fused_with(self, layer: PlannedLayer) -> list[PlannedLayer]:
        """The layers whose weights share a global scale with that of `layer` in the coming step,
        where no rank has them whole.
        """
        if not self._shares_weights:
            return []
        plan = self.run.course.plan.at(self.run.step).layers[layer.layer.name]
        return fused_layers(layer, plan.fused)

    def _check_main_memory(self, layer: PlannedLayer) -> None:
        run = self.run
        observed = 2 if self.every == 1 else 1
        check_main_memory(layer, run.microbatch_tokens, run.world.place.local_size, observed)

    def _take_weight(self, layer: PlannedLayer | None) -> None:
        """Take the weight of the layer that is audited. Every rank calls this, also one that has no
        such layer.
        """
        world = self.run.world
        divided = world.size > 1
        name = "" if layer is None else layer.layer.name
        fused: list[PlannedLayer] = []
        ready = layer is None
        if layer is not None:
            with self.failures.guarding(name):
                self._check_main_memory(layer)
                fused = self._fused_with(layer)
                for fused_layer in (layer, *fused):
                    check_room(fused_layer, divided=divided)
                ready = True
        agreed = world.everywhere(ready)
        if layer is None:
            return
        if agreed:
            with self.failures.guarding(name):
                self._fused = fused_amaxes(fused, divided=divided)
                self._weight = weight_of(layer, divided=divided)
        elif ready:
            self.failures.add(name, "another rank could not take the weight of its layer")

    def after_step(self, run: Run, step: Step) -> None:
        """Compare the observed layer of a step that was queued.

        Raises:
            AuditError: a fault was found, and audit.action is "stop".
        """
        if not self.due(step.index):
            self._keep_for_next(step.index)
            return
        began = time.perf_counter()
        layer = self.layer_at(step.index)
        result = None
        if layer is not None:
            name = layer.layer.name
            observer = self._observers.get(name)
            weight = fused = None
            with self.failures.guarding(name):
                if self._fused is not None:
                    fused = self._planned.multiplied(layer, self._fused, step.index)
                if self._weight is not None:
                    weight = self._planned.multiplied(layer, self._weight, step.index)
            if weight is None:
                observer = None  # it failed, and the other ranks of the layer hear so
            exchange(layer, observer, weight, turn=step.index)
            if observer is not None:
                with self.failures.guarding(name):
                    result = self._compared(layer, step, observer, weight, fused)
            with self.failures.guarding(name):
                result = self._with_update(layer, step, result)
        self._keep_for_next(step.index)
        self.seconds += time.perf_counter() - began
        self.report(step.index, layer, result)

    def _keep_for_next(self, step: int) -> None:
        """Keep of the calls of a step those of the layer that is audited in the next one."""
        observers = self._observers
        self._observers = {}
        self._weight = None
        self._fused = None
        self._earlier = {}
        layer = self.layer_at(step + 1) if self.due(step + 1) else None
        if layer is None:
            return
        name = layer.layer.name
        if name in observers:
            with self.failures.guarding(name):
                self._earlier[name] = [record.sources() for record in observers[name].records]

    def _compared(
        self,
        layer: PlannedLayer,
        step: Step,
        observer: Observer,
        weight: Tensor | None,
        fused: Tensor | None,
    ) -> Audited | None:
        """The result of the audit; None: it could not be made."""
        name = layer.layer.name
        earlier = self._earlier.get(name, ())
        learned = self._update is not None and self._update.learned
        result = self._planned.compare(
            layer, observer, step.index, weight, earlier, fused, learned=learned
        )
        if result is None:
            return None
        if result.failures:
            self.failures.add(name, "; ".join(result.failures))
        if not (result.gemms or result.faults or result.failures):
            self.bypassed[name] = "; ".join(result.uncovered) or "none of its GEMMs was seen"
            return None
        for reason in result.uncovered:
            self.partly.add(reason, [name])
        return result

    def _with_update(
        self, layer: PlannedLayer, step: Step, result: Audited | None
    ) -> Audited | None:
        """The result of the audit of a layer with the faults of its update."""
        name = layer.layer.name
        observer = self._observers.get(name)
        if self._update is None or observer is None:
            return result
        faults = [*self._update.faults(step, observer.dw_sums)]
        if not faults:
            return result
        result = result or Audited(layer=name, step=step.index)
        return replace(result, faults=[*result.faults, *faults])

    def left_out(self) -> Reasons:
        """What this rank could not audit."""
        reasons = Reasons()
        reasons.update_with(self.partly)
        for name, reason in self.bypassed.items():
            reasons.add(reason, [name])
        for subject, reason in self.failures.reasons.items():
            reasons.add(f"its audit failed: {reason}", [subject])
        return reasons

    # -- what is said of it ------------------------------------------------------------------------

    def report(self, step: int, layer: PlannedLayer | None, result: Audited | None) -> None:
        """Log what all ranks found, and end the run where that is asked for. Every rank calls this.

        Raises:
            AuditError: a rank found a fault, and audit.action is "stop".
        """
        if layer is None or result is None or not (result.gemms or result.faults):
            self.faults += report(self.run, step, ())
            self._record(step, None)
            return
        clean = self.clean.get(result.layer, self.began)
        self.faults += report(self.run, step, result.faults, clean)
        if not result.faults and not result.failures:
            self.clean[result.layer] = step + 1
        values = {
            "layer": result.layer,
            "gemms": list(result.gemms),
            "faults": len(result.faults),
            "uncovered": list(result.uncovered),
        }
        self._record(step, (layer.layer.name, values))

    def _record(self, step: int, audit: tuple[str, dict[str, Any]] | None) -> None:
        """Log and count the audits of all ranks, of each layer the first one; None: this rank made
        none.
        """
        audits: dict[str, dict[str, Any]] = {}
        for of_rank in self.run.world.gathered(audit):
            if of_rank is not None:
                name, values = of_rank
                audits.setdefault(name, values)
        for values in audits.values():
            self.run.record.tracker.log_event(step + 1, AUDIT, values)
        self.count += len(audits)
        self.audited.update(audits)


def summary(audits: LayerAudits, others: Sequence[str] = ()) -> str | None:
    """A sentence about the audits of a run, for its end; None: nothing is to be said. Every rank
    calls this.

    Args:
        others: the comparisons besides those of layers.
    """
    run = audits.run
    left_out = Reasons()
    layers_of_stage: dict[int, int] = {}
    of_ranks = run.world.gathered((audits.left_out(), run.world.stage, len(run.planned_layers)))
    for of_rank, stage, layers in of_ranks:
        layers_of_stage[stage] = layers
        left_out.update_with(of_rank)
    reasons = Reasons()
    if audits.count:
        text = (
            f"{counted(audits.count, 'audit')} of {counted(len(audits.audited), 'layer')} of "
            f"{sum(layers_of_stage.values())}: {counted(audits.faults, 'fault')}"
        )
        reasons = audits.coverage.uncovered(run.course.plan)
    elif audits.faults or left_out or others:
        text = f"no layer was audited: {counted(audits.faults, 'fault')}"
    else:
        return None
    reasons.update_with(left_out)
    return "; ".join([text + reasons.told_as("not covered"), *others])
