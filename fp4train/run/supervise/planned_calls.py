"""What the calls of a run's layers should have been: by the run's plan of a step, at the positions
of its microbatches, of the weights that its optimizers hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fp4train.audits.call import ObservedCall
from fp4train.audits.compare import compare_records
from fp4train.audits.expected import AuditedCall
from fp4train.audits.fault import Audited, Fault
from fp4train.audits.observe import Observer
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.gather import gather_mode, wire_form
from fp4train.precision.layers import Layer
from fp4train.quantize import Position, RunStep
from fp4train.shards import is_sharded

if TYPE_CHECKING:
    from fp4train.run.run import Run


NOT_CALLED: Final = "the step did not call it"
BY_WEIGHT: Final = "other code multiplies its weight"


class PlannedCalls:
    """The calls of the layers of `run`, compared with its plan."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on this rank."""
        return max(1, self.run.rank_rows // self.run.microbatch_rows)

    def begins(self, layer: Layer) -> list[int]:
        """The first tokens of what a layer multiplies in a step, in the order of its calls: of this
        rank's microbatches, or of those of the ranks that share its experts.
        """
        run = self.run
        first = run.world.data_rank // layer.sources * layer.sources
        ranks = range(first, first + layer.sources) if layer.sources > 1 else [run.world.data_rank]
        chunk = run.world.chunk * run.microbatch_tokens
        return [
            (rank * run.rank_rows + microbatch * run.microbatch_rows) * run.config.train.seq_len
            + chunk
            for microbatch in range(self.microbatches)
            for rank in reversed(ranks)
        ]

    def takes_first(self, layer: PlannedLayer, step: int) -> bool:
        """Whether only the first microbatch shows the amaxes of a layer: it measures those that are
        held.
        """
        specs = self.run.course.plan.at(step).layers[layer.layer.name].specs
        return any(spec.held is not None for spec in specs)

    def compare(
        self,
        layer: PlannedLayer,
        observer: Observer,
        step: int,
        weight: Tensor | None = None,
        earlier: Sequence[ObservedCall] = (),
        fused: Tensor | None = None,
        *,
        learned: bool,
    ) -> Audited | None:
        """Compare the observed call of a layer in a step; None: none of its experts had a token.

        Args:
            weight: the result of `multiplied`; None: the weight of the call itself, as where the
                model wrote it in the step.
            earlier: records of the step before; empty: none were kept.
            fused: the result of `fused_amaxes`; None: the records have the weights themselves.
            learned: whether its weight has a gradient of calls on this rank alone, so that one
                must have come.
        """
        name = layer.layer.name
        plan = self.run.course.plan.at(step).layers[name]
        records = observer.records
        if not records and not observer.ended:
            if layer.layer.experts:
                return None
            if not plan.quantised:
                return Audited(layer=name, step=step, uncovered=(BY_WEIGHT,))
            if observer.calls or not (learned and alone(self.run, layer)):
                return Audited(layer=name, step=step, uncovered=(NOT_CALLED,))
            what = "the plan has this layer, and the step did not call it"
            fault = Fault(layer=name, what=what, rank=self.run.world.place.rank)
            return Audited(layer=name, step=step, faults=(fault,))
        if not all(record.complete for record in records):
            unseen = ("its backward pass was not seen",)
            if learned:
                return Audited(layer=name, step=step, failures=unseen)
            return Audited(layer=name, step=step, uncovered=unseen)

        if observer.rewritten:
            weight = None

        def expect(number: int, record: ObservedCall) -> AuditedCall:
            previous = earlier[number] if len(earlier) == len(records) else None
            part = plan
            if record.channels is not None:
                part = plan.split_channels().channel_parts[number]
            if fused is not None:
                record.fused = [fused[record.place] if layer.layer.group else fused[0]]
            position = self._position(record, observer, step)
            return AuditedCall(record, part, position, self._weight_for(record, weight), previous)

        return compare_records(name, observer, step, expect)

    def multiplied(self, layer: PlannedLayer, weight: Tensor, step: int) -> Tensor:
        """The weight of a layer, or an amax of it, that the optimizers hold, as ranks send it to
        the layer in a step: in BF16 where the plan says that values are rounded before they are
        quantised.
        """
        run = self.run
        shards = run.world.mesh.weight_ranks
        if shards == layer.layer.sources or layer.transposed:
            return weight
        mode = gather_mode(
            run.config.parallel.gather, fully_gathered=run.config.train.whole_weights is not None
        )
        form = wire_form(run.course.plan.at(step).layers[layer.layer.name], shards, mode)
        if form.coded or form.dtype is not torch.bfloat16:
            return weight
        return weight.bfloat16().float()

    def _weight_for(self, record: ObservedCall, weight: Tensor | None) -> Tensor | None:
        """The weight that a call should have multiplied, of that of the layer."""
        if weight is None:
            return None
        if weight.dim() == 3:
            weight = weight[record.place]
        if record.cut is not None:
            axis = 0 if record.cut.along == "out" else 1
            weight = weight.tensor_split(record.cut.ranks, dim=axis)[record.cut.rank]
        if record.channels is not None:
            weight = weight.index_select(1, record.channels)
        return weight

    def _position(self, record: ObservedCall, observer: Observer, step: int) -> Position | None:
        """The position that the record of a microbatch should have. An expert may rest in it, and a
        layer that is not called in all: the record is of a later one, that of its own position.
        """
        if record.position is None:
            return None
        run = self.run
        begins = self.begins(record.plan.layer)
        token = begins[observer.number]
        rests = bool(record.plan.layer.experts) or observer.calls < self.microbatches
        if rests and record.position.token in begins[observer.number :]:
            token = record.position.token
        return Position(RunStep(run.config.run.seed, step), token)


def alone(run: Run, layer: PlannedLayer) -> bool:
    """Whether the gradient of a layer's weight is that of its calls alone: the weight has one place in
    the model, no other code multiplies it, and no hook on it changes its gradient.
    """
    weight = layer.weight
    places = sum(p is weight for _, p in run.model.named_parameters(remove_duplicate=False))
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    by_weight = layer.layer.name in getattr(run.model, "by_weight", ())
    return places == 1 and not (hooks or by_weight)


def check_room(layer: PlannedLayer, *, divided: bool) -> None:
    """Try whether this rank has the memory for `weight_of`: in the collective others would wait.

    Raises:
        RuntimeError: it has not.
    """
    weight = layer.weight
    if divided and is_sharded(weight):
        torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def weight_of(layer: PlannedLayer, *, divided: bool) -> Tensor:
    """The weight that the optimizer holds, whole and in main memory: [N, K] or, of a group,
    [E, N, K]. Of a sharded one a collective.
    """
    weight = layer.weight
    if divided and is_sharded(weight):
        weight = weight.full_tensor()  # type: ignore[attr-defined]
    if layer.transposed:
        weight = weight.mT
    return weight.detach().to("cpu", copy=True)


def fused_layers(layer: PlannedLayer, names: Sequence[str]) -> list[PlannedLayer]:
    """The layers of these names, whose weights share a global scale with that of `layer`."""
    layers = layer.fused_weights.layers(names)
    return [fused for fused in layers if isinstance(fused, PlannedLayer)]


def fused_amaxes(layers: Sequence[PlannedLayer], *, divided: bool) -> Tensor | None:
    """The largest amax of the weights that share a global scale, as the optimizers hold them:
    float32 [1], or of each expert [E]; None: there are none. Of sharded ones a collective.

    Args:
        layers: the result of `fused_layers`.
    """
    amaxes = []
    for layer in layers:
        weight = layer.weight.detach()
        if divided and is_sharded(weight):
            weight = weight.full_tensor()  # type: ignore[attr-defined]
        low, high = weight.reshape(layer.layer.group or 1, -1).aminmax(dim=1)
        amaxes.append(torch.maximum(-low, high).float().cpu())
    return torch.stack(amaxes).amax(0) if amaxes else None
