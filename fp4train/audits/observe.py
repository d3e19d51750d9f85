"""The tensors of one call of a layer: x, w, y, dy, dx, dw, and both operands of each product.

`Observer` is set as `PlannedLayer.observer`. It gives the layer a copy of its executor whose
backends keep what they multiply; the copy runs the same code on the same tensors, so no bit of the
call changes. dx is the layer's own, not the sum over all readers of x. All tensors are copied to
main memory at once, so that an audit holds none on a GPU.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch.distributed as dist
from torch import Tensor

from fp4train.audits.call import ObservedCall, Product, kept, kept_or_none
from fp4train.audits.recorder import CallRecorder, ObservedBackend, ObservedLayer, ObservedTerms
from fp4train.audits.terms import RESIDUAL_CHANNELS
from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.protocol import NotShownError
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import Executor, Gradients, Saved
from fp4train.nn.executors.cut import SummedProduct
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.groups import BackendExperts, GroupGemms
from fp4train.nn.executors.parts import ChannelParts
from fp4train.nn.executors.terms import TermGemms
from fp4train.nn.executors.whole_layer import BackendLayer, TorchLayer
from fp4train.nn.gathered import Gathered
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.scaling import DelayedScaling
from fp4train.precision.context import backward_pass
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import RunStep
from fp4train.shards import is_sharded

ADDED_TERMS: Final = "its sum is added to that of other calls"
FUSED_ELSEWHERE: Final = "fused scales of weights that other ranks share"


def why_not_observed(executor: type[Executor], plan: LayerPlan) -> str | None:
    """Why calls of an executor of this class with `plan` cannot be observed; None: they can be."""
    if issubclass(executor, BackendExperts) or any(gemm.grouped for gemm in plan.gemms):
        return "experts that are multiplied in one call: none has a product of its own"
    if issubclass(executor, BackendLayer):
        assert plan.layer_backend is not None
        return LAYER_BACKENDS[plan.layer_backend].why_not_shown(plan.table)
    if issubclass(executor, Gemms | TorchLayer | GroupGemms | ChannelParts):
        return None
    return f"{executor.__name__} is not known to the audit"


def partly_uncovered(plan: LayerPlan, device: str, *, adds_up: bool) -> list[str]:
    """What of the calls of a layer with `plan` is not compared on devices of this type.

    Args:
        adds_up: whether a step has several microbatches, whose dw are added up.
    """
    if device == "cpu":
        return []
    reasons = []
    residual = plan.recipe.residual
    if residual is not None and residual.share < 1:
        reasons.append(RESIDUAL_CHANNELS)
    if adds_up and (plan.recipe.centred or residual is not None):
        reasons.append(ADDED_TERMS)
    return reasons


class Observer(CallRecorder):
    """Keeps the tensors of one training call of a layer in a step.

    Args:
        layer: the layer; its `observer` must be this object while the step runs.
        number: number of the microbatch, from 0, whose first call of the layer is kept.
        keeps_fused: whether the weights are kept that share a global scale with the layer's; else
            the records are given their amax (`ObservedCall.fused`).

    Attributes:
        calls: training calls that came.
        dw_sums: sums of the dw's of all calls, by the place of the weight in its group.
        rewritten: whether torch wrote the weight between the start of the step and the call.
    """

    def __init__(self, layer: PlannedLayer, number: int = 0, *, keeps_fused: bool = True) -> None:
        super().__init__()
        self.layer = layer
        self.number = number
        self.keeps_fused = keeps_fused
        self.calls = 0
        self.dw_sums: dict[int, Tensor] = {}
        self.rewritten = False
        self._weight = layer.weight
        self._version = layer.weight._version
        self._now: ObservedCall | None = None
        self._kept: list[tuple[Executor, LayerCall | None, ObservedCall]] = []
        self._copies: dict[Executor, Executor] = {}
        self._counted: list[LayerCall] = []
        self._channels: list[tuple[LayerCall, Tensor]] = []
        self._scaling: dict[str, Tensor] = {}
        self._entered: dict[str, RunStep | None] = {}
        with self.guarding():
            for name, tensor in layer.scaling_state().items():
                self._scaling[name] = kept(tensor)
            histories = layer.states.get(DelayedScaling.kind)
            if isinstance(histories, DelayedScaling):
                self._entered = histories.entered()

    def __call__(self, executor: Executor) -> Executor:
        """The observed copy of `executor`; itself where it cannot be observed."""
        with self.guarding():
            if executor not in self._copies:
                self._copies[executor] = self._observed(executor)
        return self._copies.get(executor, executor)

    def close(self) -> None:
        """Forget everything but the records."""
        self._copies.clear()
        self._counted.clear()
        self._channels.clear()
        self._kept.clear()

    def _observed(self, executor: Executor) -> Executor:
        self.uncovered = why_not_observed(type(executor), executor.plan)
        if self.uncovered is None and isinstance(executor, GroupGemms):
            self.uncovered = why_not_observed(type(executor.member), executor.plan)
        if self.uncovered is None and self._joins_amaxes(executor):
            self.uncovered = "held scales that each call joins over the ranks by itself"
        if self.uncovered is not None:
            return executor
        if isinstance(executor, GroupGemms):
            group: Any = copy.copy(executor)
            group.member = self._of_engine(executor.member)
            return group  # type: ignore[no-any-return]
        begin = partial(self.begin, executor, call=None)
        if isinstance(executor, BackendLayer):
            return cast(Executor, ObservedLayer(executor, self, begin, executor.backend))
        observed = self._of_engine(executor)
        if isinstance(executor, TorchLayer):
            observed = ObservedLayer(observed, self, begin, None)
        return cast(Executor, observed)

    def _of_engine(self, executor: Executor) -> Any:
        """The copy of an executor whose passes the engine runs."""
        if isinstance(executor, ChannelParts):
            return ObservedParts(executor, self)
        if isinstance(executor, TorchLayer):
            return self._watched(copy.copy(executor), executor)
        return self.observed_gemms(executor)

    def _joins_amaxes(self, executor: Executor) -> bool:
        """Whether amaxes that a call measures are those of other ranks too, whose x and dy are not
        seen.
        """
        if self.layer.joined or not (dist.is_available() and dist.is_initialized()):
            return False
        return any(spec.held is not None for _, spec in executor.quantised(executor.plan))

    def observed_gemms(self, executor: Any) -> Any:
        """The copy of an executor of single GEMMs whose products are kept."""
        observed: Any = copy.copy(executor)
        if isinstance(executor, TermGemms):
            observed = ObservedTerms(executor, self)
        for gemm in ("fprop", "dgrad", "wgrad"):
            backend = getattr(executor, gemm)
            if isinstance(backend, SummedProduct):
                term = ObservedBackend(backend.of_rank, gemm, self)
                observed_backend: Any = backend.summing_terms_of(term)
            else:
                observed_backend = ObservedBackend(backend, gemm, self)
            setattr(observed, gemm, observed_backend)
        return self._watched(observed, executor)

    def _watched(self, observed: Any, executor: Executor) -> Any:
        runs: Any = type(executor)
        observed.forward = _Forward(self, observed, runs.forward)
        observed.backward = _Backward(self, observed, runs.backward)
        return observed

    # -- what the observed executor reports --------------------------------------------------------

    def begin(
        self,
        executor: Executor,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: LayerCall | None,
    ) -> ObservedCall | None:
        """The record of a call that begins; None: it is not kept."""
        if self.ended:
            return None
        if call is not None and not (
            any(call.gradients) and (call.training or not executor.counted)
        ):
            return None
        for _, earlier, record in self._kept:
            if call is not None and earlier is call:
                return record  # the recomputed call replaces the earlier one
        if call is None and self.calls and backward_pass() != -1:
            return None  # it repeats a call that is counted
        if call is None or all(earlier is not call for earlier in self._counted):
            self.calls += 1
            if call is not None:
                self._counted.append(call)
        complete = any(kept is executor or call is None for kept, *_ in self._kept)
        if complete or self._call_number(call) < self.number:
            return None
        member = 0 if call is None else call.member
        place = self._place(member) if self._is_group else member
        name = self.layer.layer.name
        if executor.plan.layer.group or self._is_group:
            name = f"{name}.{place}"
        record = ObservedCall(
            name=name,
            plan=executor.plan,
            position=None if call is None else call.position,
            x=kept(x),
            w=None if isinstance(w, Gathered) else kept(w),
            bias=kept_or_none(bias),
            place=place,
            scaling=self._scaling_of(call),
            fused=self._fused(executor.plan, member),
            channels=self._channels_of(call),
            first_feature=_first_feature(executor),
        )
        same = self.layer.weight is self._weight  # FSDP puts another one there
        self.rewritten = same and self._weight._version != self._version
        self._kept.append((executor, call, record))
        self.records.append(record)
        return record

    def _scaling_of(self, call: LayerCall | None) -> dict[str, Tensor]:
        """The layer's scaling before a call; no history into which an amax of its step has entered: the
        call takes the amax used last.
        """
        if call is None:
            return self._scaling
        step = call.position.step
        return {
            name: tensor
            for name, tensor in self._scaling.items()
            if self._entered.get(name, self) != step
        }

    def _channels_of(self, call: LayerCall | None) -> Tensor | None:
        for part_call, channels in self._channels:
            if part_call is call:
                return channels
        return None

    def multiplies(self, parts: Sequence[tuple[Tensor, LayerCall]]) -> None:
        """Note the channels of the parts of a call."""
        self._channels += [(call, kept(channels)) for channels, call in parts]

    @property
    def _is_group(self) -> bool:
        return bool(self.layer.layer.experts)

    def _place(self, member: int) -> int:
        members: Any = getattr(self.layer, "members", range(0))
        return int(members[member])

    def _call_number(self, call: LayerCall | None) -> int:
        """The number of the microbatch of a call: the calls for the same tokens count as one, those
        of a group's weights, of parts, and those that are recomputed.
        """
        if call is None:
            return self.calls - 1
        tokens = dict.fromkeys(counted.position.token for counted in self._counted)
        return list(tokens).index(call.position.token)

    def _fused(self, plan: LayerPlan, member: int) -> Sequence[Tensor]:
        if not plan.fused or not self.keeps_fused:
            return ()
        weights = self.layer.fused_weights.of(plan.fused, member)
        if any(isinstance(weight, Gathered) or is_sharded(weight) for weight in weights):
            raise NotShownError(FUSED_ELSEWHERE)
        return [kept(weight) for weight in weights]

    def product(self, gemm: str, product: Product) -> None:
        """A product of the running pass; its operands and its bias are copied: a gathered weight's
        memory is freed after the pass, and the optimizer changes the bias.
        Products that are added to it follow, and are not kept.
        """
        if self._now is None or self.ended or gemm in self._now.products:
            return
        with self.guarding():
            self._now.products[gemm] = product.kept()

    def mean(self, tensor: str, mean: Tensor | None) -> None:
        """The mean of the tokens of x or dy in the running pass; None: no product takes it."""
        copied = None if mean is None else self.copied(mean)
        if self._now is not None and copied is not None:
            self._now.means[tensor] = copied

    def copied(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor of the running pass; None: the pass is not kept."""
        if self._now is None:
            return None
        copied = None
        with self.guarding():
            copied = kept(tensor)
        return copied

    def forward(self, run: Callable[..., tuple[Tensor, Saved]], *arguments: Any) -> Any:
        """Run a forward pass, and keep its tensors."""
        executor, x_MK, w_NK, bias_N, call = arguments
        with self.guarding():
            self._now = self.begin(executor, x_MK, w_NK, bias_N, call)
            if self._now is not None:
                self._now.forget("fprop")  # of a pass that is recomputed
        try:
            y_MN, saved = run(*arguments)
        finally:
            record = self._now
            self._now = None
        if record is not None:
            with self.guarding():
                record.y = kept(y_MN)
        return y_MN, saved

    def backward(self, run: Callable[..., Gradients], *arguments: Any) -> Gradients:
        """Run a backward pass, and keep its tensors."""
        executor, dy_MN, _saved, call, *more = arguments
        record = next((record for _, of, record in self._kept if of is call), None)
        self._now = record
        if record is not None:
            record.forget("dgrad", "wgrad")
        total = more[0] if more else None
        earlier_sum = None
        with self.guarding():
            earlier_sum = kept_or_none(total)
            if record is not None:
                record.dw_before = earlier_sum
        try:
            gradients = run(*arguments)
        finally:
            self._now = None
        with self.guarding():
            self._add_up(call, gradients[1] if total is None else total, earlier_sum)
        if record is not None:
            with self.guarding():
                record.dy = kept(dy_MN)
                record.returned = True
                record.dx = kept_or_none(gradients[0])
                record.dw = kept_or_none(gradients[1] if total is None else total)
                if total is not None and isinstance(executor, TermGemms):
                    record.dw = None
                    record.unseen["wgrad"] = ADDED_TERMS
        return gradients

    def _add_up(self, call: LayerCall, dw: Tensor | None, earlier_sum: Tensor | None) -> None:
        """Add the dw of a call to those of its weight."""
        if dw is None:
            return
        term = kept(dw).float()
        if earlier_sum is not None:
            term -= earlier_sum
        place = self._place(call.member) if self._is_group else 0
        earlier = self.dw_sums.get(place)
        if earlier is None:
            self.dw_sums[place] = term
        elif earlier.shape == term.shape:
            earlier += term
        else:  # of parts of a weight, whose sum is that of none
            self.dw_sums[place] = term.new_zeros(0)


def _first_feature(executor: Executor) -> int:
    """Number of the first in feature of an executor's x, of a layer that is cut."""
    forms = getattr(executor, "x", None)
    return int(getattr(getattr(forms, "row", None), "feature", 0))


class _Forward:
    """The forward pass of an observed executor."""

    def __init__(self, observer: Observer, executor: Executor, run: Callable[..., Any]) -> None:
        self._observer = observer
        self._executor = weakref.ref(executor)  # which has this object: no cycle holds tensors
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._observer.forward(self._run, self._executor(), *arguments)


class _Backward(_Forward):
    """The backward pass of an observed executor."""

    def __call__(self, *arguments: Any) -> Any:
        return self._observer.backward(self._run, self._executor(), *arguments)


class ObservedParts(ChannelParts):
    """A layer with outlier channels: each part is observed as a layer of its own."""

    def __init__(self, executor: ChannelParts, observer: Observer) -> None:
        self.__dict__.update(executor.__dict__)
        self._executor = executor
        self._observer = observer
        self.whole = observer.observed_gemms(executor.whole)
        if executor.split is not None:
            self.split = copy.copy(executor.split)
            dense, outliers = executor.split.of_parts
            observed = observer.observed_gemms(dense), observer.observed_gemms(outliers)
            self.split.of_parts = observed

    def begin(self, calls: Sequence[LayerCall], x_MK: Tensor) -> None:
        """As of the executor, which remembers the channels of the last call."""
        super().begin(calls, x_MK)
        self._executor.dense_channels = self.dense_channels
        with self._observer.guarding():
            for call in calls:
                self._observer.multiplies(call.parts or ())
