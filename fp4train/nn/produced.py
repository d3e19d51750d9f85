"""Norms whose results are quantised where they are made, and what gates have in common with them
(`gated_mlp.py`): layers that read one get its codes, and the result in BF16 is neither written nor
read (`quantize/produced.py`).

    h ─ RMSNorm ─ x ─ layers    x's codes from h, weight and the 1/√(mean + ε) of each token; h may be
                                the sum of a residual stream and its change, and goes on as the
                                stream

The graph of autograd is that of the model, but that the residual stream goes through the norm: its
sum is made in the kernel that normalises, and the gradients of both its readers are added in that
of the norm's backward pass. In the place of x stands a *carrier*: one NaN, expanded to the shape of
x, so that whatever would read it by mistake shows. The layers find the codes where those of a
tensor that several layers read lie, in the context's cache. A layer whose GEMMs a backend runs
together (Transformer Engine) gets the codes as the backend's own tensor, also as its gradient;
where a kernel of the backend writes codes alone, it makes them (`backend_sources.py`), and the sum
and that of its gradients are torch's.

Whether it can be done is asked in each call, of the executors that the layers hold then
(`why_not`), and of the call itself: no gradients, torch.compile, torch.autocast, hooks that watch a
layer, and anomaly detection leave norms and gates to the model, with the same numbers but for the
last digits of 1/√(mean + ε).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import Prepared
from fp4train.backends.protocol import Forms
from fp4train.nn import backend_sources
from fp4train.nn.backend_sources import carrier_of, matrix
from fp4train.nn.call import Call, Executor
from fp4train.nn.executors.gemms import Gemms, torch_autocasts
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.operands import TensorForms
from fp4train.nn.planned import PlannedLayer, is_watched
from fp4train.precision.context import State
from fp4train.quantize import produced
from fp4train.quantize.produced import SourceTensors
from fp4train.quantize.quantizer import PLAIN

FormPair = tuple[Prepared, Prepared]
TensorPair = tuple[Tensor, Tensor]
CodeReader = Gemms | BackendLayer
"""Executors that take codes; those of subclasses do not."""


def why_not(
    readers: Sequence[Executor],
    writers: Sequence[Executor] = (),
    kind: str = "norm",
    *,
    here: bool = True,
) -> str | None:
    """Why the executors `readers` of one x do not take it from a source of this kind, or the
    `writers` of gate and up their gradients; None: they do.

    Args:
        here: with what is installed on this machine; else where Triton and the newest backends are.
    """
    why_no_kernel = _why_not_by_backend(readers, kind, here=here)
    if why_no_kernel is None:
        return None
    for executors, tensor in ((readers, "x"), (writers, "dy")):
        for executor in executors:
            name = executor.plan.layer.name
            reader = code_reader(executor)
            if reader is None:
                return f"{name} {_why_no_codes(executor)}"
            if type(reader) is not type(code_reader(executors[0])):
                return f"{executors[0].plan.layer.name} and {name} run in different backends"
            operand: TensorForms = getattr(reader, tensor)
            if operand.row.spec is None or operand.column.spec is None:
                return f"a GEMM of {name} is in high precision and needs the values of {tensor}"
            if isinstance(reader, BackendLayer):
                why_not_given = reader.backend.sources.why_not_given(reader.table, here=here)
                if why_not_given is not None:
                    if kind == "norm":
                        return why_no_kernel
                    return why_not_given
            if (reason := _why_no_source(operand, here)) is not None:
                return f"{tensor} of {name}: {reason}"
            if reader.dtype is not torch.bfloat16:
                return f"{name} has operands in {reader.dtype}"
            if operand.wants[1] != getattr(code_reader(executors[0]), tensor).wants[1]:
                return f"{executors[0].plan.layer.name} and {name} do not quantise {tensor} alike"
    return None


def _why_not_by_backend(readers: Sequence[Executor], kind: str, *, here: bool) -> str | None:
    """Why a backend's own kernel does not make the x of the readers; None: it does. Backends have
    kernels of norms.
    """
    if kind != "norm":
        return (
            f"a backend has no kernel of a {kind} that reads and writes the tensors of two layers"
        )
    return backend_sources.why_not(readers, here=here)


def why_padded(executors: Sequence[Executor], tokens: int) -> str | None:
    """Why passes of so many tokens take no codes that are made elsewhere; None: they do."""
    for layer in map(backend_sources.backend_of, executors):
        if layer is not None and tokens % layer.backend.sources.tokens:
            return (
                f"{layer.backend.title} pads {tokens} tokens to a multiple of "
                f"{layer.backend.sources.tokens}"
            )
    return None


def code_reader(executor: Executor) -> CodeReader | None:
    """The executor if it takes the codes of x and dy, else None."""
    if isinstance(executor, CodeReader) and type(executor) in (Gemms, BackendLayer):
        return executor
    return None


def _why_no_codes(executor: Executor) -> str:
    """Why an executor takes no codes, in words that follow the name of its layer."""
    if any(gemm.operands.quantised for gemm, _ in executor.plan.products):
        return "quantises its operands in parts (of experts, outlier channels or ranks)"
    return "is in high precision and needs values, not codes"


def _why_no_source(operand: TensorForms, here: bool) -> str | None:
    row = operand.row
    column = operand.column
    if operand.delayed:
        return "its amax enters a history of delayed scaling"
    if operand.requantise is not None:
        return "one form requantises the other"
    if operand.pair is None or not operand.own_amax or row.feature or row.rank:
        return "it is a part of a tensor that other ranks or layers share"
    if row.tensor == "x" and not operand.pure:
        return "it is rounded by random bits, which each layer draws for itself"
    return produced.why_not(
        row.quantizer, column.quantizer, codes=row.codes and column.codes, here=here
    )


def forms_from(
    source: SourceTensors, reader: CodeReader, tensor: str, calls: Sequence[Call | None]
) -> list[FormPair]:
    """Both forms of each result of the source, with the random bits of its call."""
    operand: TensorForms = getattr(reader, tensor)
    turned = isinstance(reader, BackendLayer) and reader.turned
    tokens = source.tensors[0].shape[0]
    forms = (operand.row, operand.column)
    keys = [
        tuple(form.key(call, tokens) if call and form.stochastic else None for form in forms)
        for call in calls
    ]
    return list(
        produced.produce(operand.row.quantizer, operand.column.quantizer, source, keys, turned)
    )


class Producer:
    """A norm or gate that quantises its result for the layers that read it.

    Args:
        readers: layers that read it, and alone do.
        writers: layers whose outputs it is made of, if their gradients are to be quantised here,
            too.
        kind: kind of the source (`SourceTensors`).
    """

    def __init__(
        self,
        readers: Sequence[PlannedLayer],
        writers: Sequence[PlannedLayer] = (),
        kind: str = "norm",
    ) -> None:
        self.readers, self.writers, self.kind = tuple(readers), tuple(writers), kind
        self._seen: tuple[Executor | None, ...] = ()
        self._runs = self.by_backend = False
        """Whether it quantises its result, and whether in a backend's own kernels."""
        self.asked = False
        """Whether the model has asked it for a result, which it may have declined."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_seen": (), "_runs": False}

    def resolve(self, executors: Sequence[Executor], *, here: bool = True) -> str | None:
        """Why it does not quantise its result for layers with these executors, those of the readers
        first (`why_not`); else decide whether a backend's own kernels do.
        """
        readers = executors[: len(self.readers)]
        writers = executors[len(self.readers) :]
        if (reason := why_not(readers, writers, self.kind, here=here)) is None:
            self.by_backend = _why_not_by_backend(readers, self.kind, here=here) is None
        return reason

    def ready(self, x: Tensor) -> tuple[list[Executor], State] | None:
        """(the executors of readers and writers, the state of this thread) where codes can be made
        from tensors like x.
        """
        self.asked = True
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or x.dtype is not torch.bfloat16
            or type(x) is not Tensor
            or x.numel() == 0
            or torch_autocasts(x.device.type)
            or torch.is_anomaly_enabled()
        ):
            return None
        layers = self.readers + self.writers
        if not all(layer.weight.requires_grad for layer in layers) or any(map(is_watched, layers)):
            return None
        candidates = [layer.executor_now(x.device, x.dtype) for layer in layers]
        executors = tuple(executor for executor, _ in candidates)
        ready_executors = [executor for executor in executors if executor is not None]
        if executors != self._seen:
            self._runs = (
                len(ready_executors) == len(layers) and self.resolve(ready_executors) is None
            )
            self._seen = executors
        if not self._runs:
            return None
        if why_padded(ready_executors, x.numel() // x.shape[-1]) is None:
            return (ready_executors, candidates[0][1])
        return None


class NormProducer(Producer):
    """RMSNorm, or one of the kind "root"."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, change: Tensor | None = None
    ) -> TensorPair | None:
        """(A carrier of the norm of h = x + change, or of h = x, and h, for who reads the residual
        stream after the norm); None: it cannot be made here.
        """
        executors = self.ready(x)
        if (
            type(weight) not in PLAIN
            or executors is None
            or not (change is None or _adds(x, change))
        ):
            return None
        readers, now = executors
        if self.by_backend:
            h = x if change is None else x + change
            return backend_sources.norm(h, weight, eps, readers[0], now), h
        pair: TensorPair = _Norm.apply(
            x, change, weight, eps, self.kind, code_reader(readers[0]), now
        )  # type: ignore[no-untyped-call]
        return pair


def _adds(x: Tensor, change: Tensor) -> bool:
    """Whether a kernel adds the change to x."""
    return (type(change), change.dtype, change.shape) == (type(x), x.dtype, x.shape)


def provide(source: SourceTensors, executor: CodeReader, now: State, like: Tensor) -> Tensor:
    """Quantise x of a source for the layers that read it next, and return its carrier."""
    (forms,) = forms_from(source, executor, "x", (None,))
    carrier = carrier_of(like)
    assert now.context is not None
    x_MK = carrier.reshape(-1, like.shape[-1])
    if isinstance(executor, BackendLayer):
        sources = executor.backend.sources
        sources.give(
            now.context.shared, x_MK, executor.table, sources.given(cast(Forms, forms), x_MK.shape)
        )
        return carrier
    now.context.shared["input"] = (executor.x.wants[True], x_MK._version, x_MK, forms)
    return carrier


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor | None,
        weight_K: Tensor,
        eps: float,
        kind: str,
        executor: CodeReader,
        now: State,
    ) -> TensorPair:
        h = x if change is None else x.new_empty(x.shape)
        terms = () if change is None else (x, change)
        h_MK = matrix(h)
        rstd_M = torch.empty(h_MK.shape[0], dtype=torch.float32, device=h.device)
        source = SourceTensors(kind, (h_MK, weight_K.detach(), rstd_M, *map(matrix, terms)), eps)
        carrier = provide(source, executor, now, h)
        ctx.save_for_backward(h, weight_K, rstd_M)
        ctx.set_materialize_grads(False)
        ctx.backward_of = partial(produced.norm_backward, outside=eps if kind == "root" else 0.0)
        return carrier, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, added: Tensor | None) -> tuple[Tensor | None, ...]:
        dh = added
        dweight = None
        if dy is not None:
            h, weight_K, rstd_M = ctx.saved_tensors
            added_MK = None if added is None else matrix(added)
            dh, dweight = ctx.backward_of(
                matrix(dy), matrix(h), weight_K.detach(), rstd_M, added_MK=added_MK
            )
            dh = dh.view(h.shape)
            dweight = dweight.to(weight_K.dtype)
        return dh, dh if ctx.needs_input_grad[1] else None, dweight, None, None, None, None
