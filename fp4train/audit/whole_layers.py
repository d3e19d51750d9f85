"""Layers whose three GEMMs others run, observed at their edges: torch in high precision, Transformer
Engine.

x, w and y pass through the identity, whose backward pass copies the gradient. Products of a backend
are shown by itself (`LayerBackend.watcher`), in the passes of the layer alone: backward from where
dy arrives to the last product that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.audit.call import ObservedCall, Product, kept
from fp4train.backends.protocol import (
    LayerBackend,
    Multiplied,
    NotShownError,
    ProductWatcher,
)
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import Executor
from fp4train.nn.executors.whole_layer import BackendLayer, TorchLayer


class CallRecorder(Protocol):
    """Keeps the record of one call of a layer (`audit.observe.Observer`)."""

    def guarding(self) -> AbstractContextManager[None]:
        """A context in which tensors are kept; a failure ends the observation alone."""

    def begin(
        self,
        executor: Executor,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: LayerCall | None,
    ) -> ObservedCall | None:
        """The record of a call that begins; None: it is not kept."""


class ObservedTorchLayer(TorchLayer):
    """A layer in high precision whose gradients pass through functions that copy them."""

    def __init__(self, executor: TorchLayer, observer: CallRecorder) -> None:
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
        guarding = self._observer.guarding
        x_MK = passed(x_MK, record, "dx", guarding)
        w = passed(w, record, "dw", guarding)
        y_MN = super().__call__(x_MK, w, bias, None)
        with self._observer.guarding():
            record.y = kept(y_MN)
        return passed(y_MN, record, "dy", guarding)


class ObservedBackendLayer(BackendLayer):
    """A layer whose backend shows what it multiplies."""

    def __init__(self, executor: BackendLayer, observer: CallRecorder) -> None:
        self.__dict__.update(executor.__dict__)
        self._observer = observer

    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: LayerCall) -> Tensor:
        if not torch.is_grad_enabled():
            return super().__call__(x_MK, w, bias, call)
        guarding = self._observer.guarding
        record = passes = None
        with guarding():
            record = self._observer.begin(self, x_MK, w, bias, None)
            if record is not None:
                gradients = {"dgrad": x_MK, "wgrad": w}
                gemms = {gemm for gemm, tensor in gradients.items() if tensor.requires_grad}
                passes = ShownPasses(record, guarding, self.backend, gemms)
        if record is None or passes is None:
            return super().__call__(x_MK, w, bias, call)
        x_MK = passed(x_MK, record, "dx", guarding)
        with passes.forward():
            y_MN = super().__call__(x_MK, w, bias, call)
        with guarding():
            record.y = kept(y_MN)
        return passed(y_MN, record, "dy", guarding, passes.backward)


class ShownPasses:
    """The passes of one call whose products a backend shows.

    Args:
        record: receives the products; x and dy are filled up to the tokens that were multiplied.
        guarding: context in which a failure ends no pass.
        backend: backend that multiplies.
        wanted: GEMMs of the backward pass that will be multiplied.
    """

    def __init__(
        self,
        record: ObservedCall,
        guarding: Callable[[], AbstractContextManager[None]],
        backend: LayerBackend,
        wanted: set[str],
    ) -> None:
        self._record = record
        self._guarding = guarding
        self._left = wanted
        self._backend = backend.name
        self._watcher = backend.watcher(self._seen, guarding)

    def forward(self) -> AbstractContextManager[None]:
        """The context of the forward pass."""
        return _Watching(self._watcher)

    def backward(self) -> None:
        """Watch the products that follow, up to the last one that is wanted."""
        if self._left:
            self._watcher.begin()

    def close(self) -> None:
        """Watch no more."""
        self._watcher.end()

    def _seen(self, product: Multiplied) -> None:
        record = self._record
        shown = Product(
            product.first,
            product.second,
            product.result,
            product.bias,
            product.before,
            elsewhere=True,
            backend=self._backend,
        )
        copied = record.products[product.gemm] = shown.kept()
        if product.gemm == "fprop":
            if record.x is not None:
                record.x = _filled(record.x, len(product.result))
            return
        if product.gemm == "dgrad" and record.dy is not None:
            record.dy = _filled(record.dy, len(product.result))
        elif product.gemm == "wgrad":
            record.dw = copied.result
            forward = record.products.get("fprop")
            if record.dy is not None and forward is not None:
                record.dy = _filled(record.dy, len(forward.result))
        self._left.discard(product.gemm)
        if not self._left:
            self._watcher.end()


class _Watching(AbstractContextManager[None]):
    def __init__(self, watcher: ProductWatcher) -> None:
        self._watcher = watcher

    def __enter__(self) -> None:
        self._watcher.begin()

    def __exit__(self, *raised: object) -> None:
        self._watcher.end()


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros behind it: backends fill up tokens to whole blocks."""
    return F.pad(tensor, (0, 0, 0, rows - len(tensor)))


def passed(
    tensor: Tensor,
    record: ObservedCall,
    name: str,
    guarding: Callable[[], AbstractContextManager[None]],
    then: Callable[[], None] | None = None,
) -> Tensor:
    """The tensor, whose gradient becomes the field `name` of the record.

    Args:
        then: function that is called where the gradient has arrived.
    """
    if not tensor.requires_grad:
        return tensor
    result: Tensor = _Passed.apply(tensor, record, name, guarding, then)  # type: ignore[no-untyped-call]
    return result


class _Passed(torch.autograd.Function):
    """The identity, whose gradient is kept as a field of a record."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        record: ObservedCall,
        name: str,
        guarding: Callable[[], AbstractContextManager[None]],
        then: Callable[[], None] | None,
    ) -> Tensor:
        ctx.record = record
        ctx.name = name
        ctx.guarding = guarding
        ctx.then = then
        return tensor.detach()  # no view, which later code could not write

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.guarding():
            if type(gradient) is not Tensor:
                kind = type(gradient).__name__
                raise NotShownError(f"its {ctx.name} is no tensor of values, but a {kind}")
            matrix = kept(gradient).reshape(-1, gradient.shape[-1])
            setattr(ctx.record, ctx.name, matrix)
            if ctx.then is not None:
                ctx.then()
        return gradient, None, None, None, None
