"""The tensors of one call of a layer: x, w, y, dy, dx, dw, and both operands of each product.

`Observer` is set as `PlannedLayer.observer`. It gives the layer a copy of its executor whose
backends keep what they multiply; the copy runs the same code on the same tensors, so no bit of the
call changes. dx is the layer's own, not the sum over all readers of x. Tensors that later code may
write are copied.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import Executor, Gradients, Saved
from fp4train.nn.executors.cut import CutGemms
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.groups import BackendExperts, GroupGemms
from fp4train.nn.executors.parts import ChannelParts
from fp4train.nn.executors.whole_layer import BackendLayer, TorchLayer
from fp4train.nn.gathered import Gathered
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Decoded, Position, Quantized, QuantSpec
from fp4train.text import first_line


@dataclass
class Product:
    """One product that a backend computed: first [R, C] · second [S, C]ᵀ + bias [S].

    before: the float32 sum to which it was added; None: it stands alone.
    elsewhere: whether another device than a CPU computed it.
    """

    first: Prepared
    second: Prepared
    result: Tensor
    bias: Tensor | None = None
    before: Tensor | None = None
    elsewhere: bool = False


def _on_host(operand: Prepared) -> Prepared:
    if isinstance(operand, Quantized):
        tensors = (None if tensor is None else tensor.cpu() for tensor in operand[2:])
        return Quantized(operand.spec, operand.shape, *tensors)  # type: ignore[arg-type]
    scale = None if operand.scale is None else operand.scale.cpu()
    return Decoded(operand.values.cpu(), scale)


def _duplicate(operand: Prepared) -> Prepared:
    if isinstance(operand, Quantized):
        tensors = (None if tensor is None else tensor.clone() for tensor in operand[2:])
        return Quantized(operand.spec, operand.shape, *tensors)  # type: ignore[arg-type]
    scale = None if operand.scale is None else operand.scale.clone()
    return Decoded(operand.values.clone(), scale)


@dataclass
class ObservedCall:
    """One call of a layer with its backward pass.

    Args:
        name: name that keys the random bits; of an expert that of the group and its number.
        plan: the plan that the executor ran.
        position: position that keyed the random bits; None: nothing drew any.
        member: place of the weight in its group.
        x: [M, K]; w: [N, K], None where it is gathered; bias: [N] or None.
        y: [M, N]; dy, dx, dw: its gradients, None until backward, or where they are not wanted.
        products: GEMM → what the backend multiplied; none in high precision by torch.
        scaling: tensors of the layer's delayed scaling before the step.
        fused: weights that share a global scale with w.
    """

    name: str
    plan: LayerPlan
    position: Position | None
    x: Tensor
    w: Tensor | None
    bias: Tensor | None
    member: int = 0
    y: Tensor | None = None
    dy: Tensor | None = None
    dx: Tensor | None = None
    dw: Tensor | None = None
    products: dict[str, Product] = field(default_factory=dict)
    scaling: dict[str, Tensor] = field(default_factory=dict)
    fused: Sequence[Tensor] = ()

    def on_host(self) -> ObservedCall:
        """The call with all tensors in main memory, where the reference computes."""
        products = {
            gemm: replace(
                product,
                first=_on_host(product.first),
                second=_on_host(product.second),
                result=product.result.cpu(),
                bias=None if product.bias is None else product.bias.cpu(),
                before=None if product.before is None else product.before.cpu(),
                elsewhere=product.elsewhere or product.result.device.type != "cpu",
            )
            for gemm, product in self.products.items()
        }
        names = ("w", "bias", "y", "dy", "dx", "dw")
        tensors: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name).cpu()
            for name in names
        }
        return replace(
            self,
            x=self.x.cpu(),
            products=products,
            scaling={name: tensor.cpu() for name, tensor in self.scaling.items()},
            fused=[weight.cpu() for weight in self.fused],
            **tensors,
        )

    @property
    def complete(self) -> bool:
        """Whether its backward pass has run."""
        return self.dy is not None


def why_not_observed(executor: type[Executor], plan: LayerPlan) -> str | None:
    """Why calls of an executor of this class with `plan` cannot be observed; None: they can be."""
    if any(gemm.grouped for gemm in plan.gemms):
        return "experts that are multiplied in one call: none has a product of its own"
    if issubclass(executor, CutGemms):
        return "tensor parallelism: a rank has one term of each sum"
    if any(spec.held is not None for _, spec in executor.quantised(plan)):
        return "held scales: the amax of the first call of an earlier step is not followed"
    if issubclass(executor, ChannelParts):
        return "outlier channels: two recipes add up one product"
    if issubclass(executor, BackendLayer | BackendExperts):
        return "a backend that runs the three GEMMs together shows no codes"
    if issubclass(executor, Gemms | TorchLayer | GroupGemms):
        return None
    return f"{executor.__name__} is not known to the audit"


class Observer:
    """Keeps the tensors of one training call of a layer in a step.

    Args:
        layer: the layer; its `observer` must be this object while the step runs.
        number: number of the call in the step that is kept: microbatches, counted from 0.

    Attributes:
        call: the call; None: none came.
        calls: training calls that came.
        uncovered: why the layer cannot be observed; None: it can be.
        failure: why observing it failed, after which nothing more is kept; None: it did not. The
            pass goes on.
    """

    def __init__(self, layer: PlannedLayer, number: int = 0) -> None:
        self.layer = layer
        self.number = number
        self.call: ObservedCall | None = None
        self.calls = 0
        self.uncovered: str | None = None
        self.failure: str | None = None
        self._now: ObservedCall | None = None
        self._of: LayerCall | None = None
        self._copies: dict[Executor, Executor] = {}
        self._counted: list[LayerCall] = []
        self._scaling: dict[str, Tensor] = {}
        with self.guarding():
            for name, tensor in layer.scaling_state().items():
                self._scaling[name] = tensor.detach().clone()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """A context in which tensors are kept; a failure ends the observation alone."""
        try:
            yield
        except Exception as error:
            self.call = self._now = None
            if self.failure is None:
                self.failure = first_line(error)

    def __call__(self, executor: Executor) -> Executor:
        """The observed copy of `executor`; itself where it cannot be observed."""
        with self.guarding():
            if executor not in self._copies:
                self._copies[executor] = self._observed(executor)
        return self._copies.get(executor, executor)

    def close(self) -> None:
        """Forget everything but the call."""
        self._copies.clear()
        self._counted.clear()
        self._of = None

    def _observed(self, executor: Executor) -> Executor:
        self.uncovered = why_not_observed(type(executor), executor.plan)
        if self.uncovered is None and isinstance(executor, GroupGemms):
            self.uncovered = why_not_observed(type(executor.member), executor.plan)
        if self.uncovered is not None:
            return executor
        observed: Any
        if isinstance(executor, GroupGemms):
            group: Any = copy.copy(executor)
            group.member = self._observed(executor.member)
            return group  # type: ignore[no-any-return]
        if isinstance(executor, TorchLayer):
            observed = ObservedTorchLayer(executor, self)
        else:
            observed = copy.copy(executor)
            for gemm in ("fprop", "dgrad", "wgrad"):
                setattr(observed, gemm, ObservedBackend(getattr(executor, gemm), gemm, self))
        runs = type(executor)
        observed.forward = _Forward(self, observed, runs.forward)  # type: ignore[attr-defined]
        observed.backward = _Backward(self, observed, runs.backward)  # type: ignore[attr-defined]
        return observed  # type: ignore[no-any-return]

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
        if self.failure is not None or (call is not None and not any(call.gradients)):
            return None
        if call is not None and call is self._of:
            assert self.call is not None
            return self.call  # the recomputed call replaces the earlier one
        if call is None or all(earlier is not call for earlier in self._counted):
            self.calls += 1
            if call is not None:
                self._counted.append(call)
        if self.call is not None or self._call_number(call) < self.number:
            return None
        self._of = call
        member = 0 if call is None else call.member
        name = self.layer.layer.name
        if executor.plan.layer.group or self._is_group:
            name = f"{name}.{self._place(member)}"
        self.call = ObservedCall(
            name=name,
            plan=executor.plan,
            position=None if call is None else call.position,
            x=x.detach().clone(),
            w=None if isinstance(w, Gathered) else w.detach().clone(),
            bias=None if bias is None else bias.detach().clone(),
            member=member,
            scaling=self._scaling,
            fused=self._fused(executor.plan, member),
        )
        return self.call

    @property
    def _is_group(self) -> bool:
        return bool(self.layer.layer.experts)

    def _place(self, member: int) -> int:
        members: Any = getattr(self.layer, "members", range(0))
        return int(members[member])

    def _call_number(self, call: LayerCall | None) -> int:
        """The number of a call in the step; those of a group's weights count as one."""
        if call is None or not self._is_group:
            return self.calls - 1
        earlier = [other for other in self._counted if other.member == call.member]
        return len(earlier) - 1

    def _fused(self, plan: LayerPlan, member: int) -> Sequence[Tensor]:
        if not plan.fused:
            return ()
        weights = self.layer.fused_weights.of(plan.fused, member)
        return [weight.detach().clone() for weight in weights]

    def product(self, gemm: str, product: Product) -> None:
        """A product of the running pass; its operands are copied, because a gathered weight's memory
        is freed after the pass.
        """
        if self._now is None:
            return
        with self.guarding():
            first = _duplicate(product.first)
            second = _duplicate(product.second)
            self._now.products[gemm] = replace(product, first=first, second=second)

    def copied(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor of the running pass; None: the pass is not kept."""
        if self._now is None:
            return None
        duplicate = None
        with self.guarding():
            duplicate = tensor.detach().clone()
        return duplicate

    def forward(self, run: Callable[..., tuple[Tensor, Saved]], *arguments: Any) -> Any:
        """Run a forward pass, and keep its tensors."""
        executor, x_MK, w_NK, bias_N, call, *_more = arguments
        with self.guarding():
            self._now = self.begin(executor, x_MK, w_NK, bias_N, call)
        try:
            y_MN, saved = run(*arguments)
        finally:
            record, self._now = self._now, None
        if record is not None:
            with self.guarding():
                record.y = y_MN.detach().clone()
        return y_MN, saved

    def backward(self, run: Callable[..., Gradients], *arguments: Any, **options: Any) -> Gradients:
        """Run a backward pass, and keep its tensors."""
        _executor, dy_MN, _saved, call, *more = arguments
        record = self.call if call is self._of else None
        self._now = record
        total = more[0] if more else None
        try:
            gradients = run(*arguments, **options)
        finally:
            self._now = None
        if record is not None:
            with self.guarding():
                record.dy = dy_MN.detach().clone()
                record.dx = _copied(gradients[0])
                record.dw = _copied(gradients[1] if total is None else total)
        return gradients


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


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

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._observer.backward(self._run, self._executor(), *arguments, **options)


class ObservedBackend:
    """A backend that reports what it multiplies for one GEMM."""

    def __init__(self, backend: Backend, gemm: str, observer: Observer) -> None:
        self._backend = backend
        self._gemm = gemm
        self._observer = observer
        self.name = backend.name
        self.takes_codes = backend.takes_codes
        self.takes_tiles = backend.takes_tiles
        self.adds = backend.adds

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        return self._backend.why_not(table, gemm, layer, device)

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        result = self._backend.product(a, b, out_dtype=out_dtype, bias=bias)
        copied = self._observer.copied(result)
        if copied is not None:
            self._observer.product(self._gemm, Product(a, b, copied, bias))
        return result

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        before = self._observer.copied(total_RS)
        self._backend.add(total_RS, a, b)
        after = self._observer.copied(total_RS)
        if before is not None and after is not None:
            self._observer.product(self._gemm, Product(a, b, after, None, before))

    def summing(self, accumulator: str) -> Backend:
        return ObservedBackend(self._backend.summing(accumulator), self._gemm, self._observer)

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return self._backend.writes_float32(spec)


class ObservedTorchLayer(TorchLayer):
    """A layer in high precision whose gradients pass through functions that copy them."""

    def __init__(self, executor: TorchLayer, observer: Observer) -> None:
        self.__dict__.update(executor.__dict__)
        self._observer = observer

    def __call__(
        self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: LayerCall | None
    ) -> Tensor:
        if call is not None or not torch.is_grad_enabled():
            return super().__call__(x_MK, w, bias, call)
        record = None
        with self._observer.guarding():
            record = self._observer.begin(self, x_MK, w, bias, None)
        if record is None:
            return super().__call__(x_MK, w, bias, None)
        x_MK = self._passed(x_MK, record, "dx")
        w = self._passed(w, record, "dw")
        y_MN = super().__call__(x_MK, w, bias, None)
        with self._observer.guarding():
            record.y = y_MN.detach().clone()
        return self._passed(y_MN, record, "dy")

    def _passed(self, tensor: Tensor, record: ObservedCall, name: str) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        result: Tensor = _Passed.apply(tensor, record, name, self._observer)  # type: ignore[no-untyped-call]
        return result


class _Passed(torch.autograd.Function):
    """The identity, whose gradient is kept as a field of a record."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, record: ObservedCall, name: str, observer: Observer
    ) -> Tensor:
        ctx.record = record
        ctx.name = name
        ctx.observer = observer
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.observer.guarding():
            setattr(ctx.record, ctx.name, gradient.detach().clone())
        return gradient, None, None, None
