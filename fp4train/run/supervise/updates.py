"""The update of an audited step: the gradient of the audited layer against the clipped sum of its dw's,
and the update of its weight, and of one parameter besides weights of layers in turn, made again in
float64. Of large ones `SAMPLED` elements are compared, others in each audit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fp4train.audits.bits import where_differing
from fp4train.audits.call import kept
from fp4train.audits.fault import Fault
from fp4train.nn.planned import PlannedLayer
from fp4train.optim.repeated import UPDATES, WEIGHT, rounding_of
from fp4train.precision.layers import elementwise
from fp4train.run.queued import Step
from fp4train.run.supervise.audit_report import AuditFailures
from fp4train.run.supervise.planned_calls import alone
from fp4train.shards import local

if TYPE_CHECKING:
    from fp4train.run.run import Run

SAMPLED: Final = 1 << 22
_GRADIENT: Final = "gradient"
_MOVED: Final = 2**-12
"""Error of a change, as its share: of roots, quotients and powers."""
_BF16: Final = 2**-7
"""Distance of two neighbours in BF16, to either of which a moment may be rounded."""
_SUMMED: Final = 2**-10
"""Error of a sum of dw's, as a share of its largest element."""


class UpdateAudit:
    """The update of the step in which `layer` is audited, on this rank.

    Args:
        turn: number of the audit, which chooses the other parameter and the elements.
    """

    def __init__(self, run: Run, layer: PlannedLayer, failures: AuditFailures, turn: int) -> None:
        self.run = run
        self.layer = layer
        self.failures = failures
        self.turn = turn
        weights = {id(layer.weight) for layer in run.planned_layers if alone(run, layer)}
        named = dict(run.model.named_parameters())
        others = [name for name, p in named.items() if id(p) not in weights and p.requires_grad]
        self.name = f"{layer.layer.name}.weight"
        self._parameters: dict[str, Any] = {self.name: layer.weight}
        if others:
            other = others[turn % len(others)]
            self._parameters[other] = named[other]
        self._before: dict[str, dict[str, Tensor]] = {}
        self._after: dict[str, dict[str, Tensor]] = {}
        self._gradient: Tensor | None = None

    @property
    def learned(self) -> bool:
        """Whether the weight of the layer has a gradient, of calls on this rank alone."""
        gradient = self._gradient
        return (
            self.run.world.mesh.token_ranks == 1 and gradient is not None and bool(gradient.any())
        )

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A context of the step; other hooks on the optimizer come around the observed update."""
        optimizer: Any = self.run.optimizer
        before = optimizer.register_step_pre_hook(lambda *_: self._keep(self._before))
        after = optimizer.register_step_post_hook(lambda *_: self._keep(self._after))
        # torch has no public way to put a hook first
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _keep(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Keep gradient, weight and moments of the parameters, as they are before or after."""
        with self.failures.guarding(self.layer.layer.name):
            divisor: Any = getattr(self.run.optimizer, "grad_scale", 1.0)
            for name, parameter in self._parameters.items():
                if parameter.grad is None or (states is self._before and name in states):
                    continue  # it has no update, or one more
                gradient = local(parameter.grad) / divisor
                state = self.run.optimizer.state.get(parameter, {})
                tensors = {WEIGHT: parameter, _GRADIENT: gradient, **state}
                states[name] = {
                    entry: self._sample(tensor)
                    for entry, tensor in tensors.items()
                    if isinstance(tensor, Tensor)
                }
                if name == self.name and states is self._before:
                    self._gradient = kept(gradient)

    def _sample(self, tensor: Tensor) -> Tensor:
        """Elements of this rank's part of a tensor, float64."""
        flat = local(tensor.detach()).reshape(-1)
        start = self.turn * SAMPLED % max(1, len(flat))
        return kept(flat[start : start + SAMPLED]).double()

    def faults(self, step: Step, sums: Mapping[int, Tensor]) -> Iterator[Fault]:
        """The faults of the update that `step` queued.

        Args:
            sums: sums of the layer's dw's, by the place of the weight in its group.
        """
        run = self.run
        if run.failed is not None and bool(run.failed):
            return
        if self._gradient is not None and run.world.size == 1 and self._differs(step, sums):
            what = "the update takes another gradient than the clipped sum of its dw's"
            yield Fault(layer=self.name, what=what)
        if type(run.config.optim) not in UPDATES:
            return
        for name in self._before:
            for entry, differs in self._updated_otherwise(name, step):
                if apart := where_differing(differs):
                    what = f"the update of its {entry} is not that of optim and schedule"
                    yield Fault(layer=name, what=what, share=apart.share)

    def _differs(self, step: Step, sums: Mapping[int, Tensor]) -> bool:
        """Whether the gradient of the layer's weight is another than the clipped sum of its dw's,
        which no hook on the optimizer changes.
        """
        assert self._gradient is not None
        optimizer: Any = self.run.optimizer
        if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
            return False
        if not alone(self.run, self.layer):
            return False
        gradient = self._gradient.mT if self.layer.transposed else self._gradient
        factor = 1 / step.loss_scale
        clip = self.run.config.optim.clip
        if clip is not None:
            factor *= min(1.0, clip / (step.read()[1] + 1e-6))
        for place, total in sums.items():
            of_place = gradient[place] if gradient.dim() == 3 else gradient
            if of_place.shape != total.shape:
                continue
            terms = self.run.rank_rows / self.run.microbatch_rows
            share = _SUMMED + terms * rounding_of(self.layer.weight)
            slack = share * factor * total.abs().max()
            if (of_place - factor * total).abs().max() > slack:
                return True
        return False

    def _updated_otherwise(self, name: str, step: Step) -> Iterator[tuple[str, Tensor]]:
        """(weight or moment, where it is not that of the repeated update)."""
        optim: Any = self.run.config.optim
        groups = self.run.optimizer.param_groups
        after = self._after[name]
        before = {entry: torch.zeros_like(tensor) for entry, tensor in after.items()}
        before |= self._before[name]
        parameter = self._parameters[name]
        if any(parameter is p for group in groups if "ns_steps" in group for p in group["params"]):
            before.pop("exp_avg", None)  # Muon's: it stays behind where AdamW was the optimizer
        spared = parameter.dim() < 2 or parameter in elementwise(self.run.model)
        decay = 0.0 if spared else optim.weight_decay
        rate = float(step.values["train/lr"])
        expected = UPDATES[type(optim)](optim, before, before[_GRADIENT], rate, decay)
        for entry, values in expected.items():
            slack = rounding_of(parameter) * (before[entry].abs() + values.abs())
            slack += _MOVED * (values - before[entry]).abs()
            if entry != WEIGHT and getattr(optim, "moments", "") == "bfloat16":
                slack += _BF16 * values.abs()
            least = torch.finfo(parameter.dtype).tiny
            yield entry, (after[entry] - values).abs() > slack + least
