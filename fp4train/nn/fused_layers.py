"""Norms and gates whose results are quantised where they are made: the layers that read one get its
codes, and the result in BF16 is neither written nor read (`quantize/produced.py`).

    h ─ RMSNorm ─ x ─ layers    x's codes from h, weight and the 1/√(mean + ε) of each token; h may be
                                the sum of a residual stream and its change, and goes on as the
                                stream

Such a module has norm or gate and the layers around it in one autograd function, whose context has
the codes (`normed_linears.py`, `gated_mlp.py`). Layers whose GEMMs a backend runs together
(Transformer Engine) get the codes as the backend's own tensor (`backend_sources.py`).

Whether it can be done is asked in each call, of the executors that the layers hold then
(`why_not`), of the modules that would not be called (`watched`), and of the call itself: no
gradients, torch.compile, torch.autocast and anomaly detection leave norms and gates to the model,
with the same numbers but for the last digits of 1/√(mean + ε), those of a gate's gradients (17 of
4·10⁷ on a CPU, whose exponential rounds otherwise), and the order in which the gradients of x are
added where a gated MLP reads an x that no such norm makes (OLMo 2).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fp4train.backends.protocol import CodePair
from fp4train.nn import backend_sources
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import Executor, torch_autocasts
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.linear import Linear
from fp4train.nn.operands import TensorForms
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.context import State
from fp4train.quantize import produced
from fp4train.quantize.produced import SourceTensors

Ready = tuple[list[Executor], State]
"""The executors of readers and writers, and the state of this thread."""
CodeReader = Gemms | BackendLayer
"""Executors that take codes; those of subclasses do not."""


def why_not(
    readers: Sequence[Executor],
    writers: Sequence[Executor] = (),
    kind: str = "norm",
    *,
    here: bool = True,
    why_not_own: str | None = None,
) -> str | None:
    """Why the executors `readers` of one x do not take it from a source of this kind, or the
    `writers` of gate and up their gradients; None: they do.

    Args:
        here: with what is installed on this machine; else where Triton and the newest backends are.
        why_not_own: why kernels that are no backend's do not run; None: they do.
    """
    why_no_kernel = why_not_by_backend(readers, kind, here=here)
    if why_no_kernel is None:
        return None
    of_tensors = (readers, "x", "the input x"), (writers, "dy", "the gradient dy")
    for executors, tensor, described in of_tensors:
        for executor in executors:
            name = executor.plan.layer.name
            taker = taking_codes(executor)
            if taker is None:
                return f"{name} {_why_no_codes(executor)}"
            if type(taker) is not type(taking_codes(executors[0])):
                return f"{executors[0].plan.layer.name} and {name} run in different backends"
            operand: TensorForms = getattr(taker, tensor)
            if operand.row.spec is None or operand.column.spec is None:
                return f"a GEMM of {name} is in high precision and needs the values of {tensor}"
            if isinstance(taker, BackendLayer):
                why_not_given = taker.backend.sources.why_not_given(taker.table, here=here)
                if why_not_given is not None:
                    if kind == "norm":
                        return why_no_kernel
                    return why_not_given
            if (reason := _why_no_source(operand, here)) is not None:
                return f"{described} of {name}: {reason}"
            if taker.dtype is not torch.bfloat16:
                return f"{name} has operands in {taker.dtype}"
            if operand.wants[1] != getattr(taking_codes(executors[0]), tensor).wants[1]:
                return f"{executors[0].plan.layer.name} and {name} do not quantise {tensor} alike"
    return why_not_own


def why_not_by_backend(readers: Sequence[Executor], kind: str, *, here: bool = True) -> str | None:
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


def taking_codes(executor: Executor) -> CodeReader | None:
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
    source: SourceTensors, reader: CodeReader, tensor: str, calls: Sequence[LayerCall | None]
) -> list[CodePair]:
    """Both forms of each result of the source, with the random bits of its call."""
    operand: TensorForms = getattr(reader, tensor)
    turned = isinstance(reader, BackendLayer) and reader.turned
    tokens = source.tensors[0].shape[0]
    forms = (operand.row, operand.column)
    keys = [
        tuple(form.key(call, tokens) if call and form.stochastic else None for form in forms)
        for call in calls
    ]
    return produced.produce(operand.row.quantizer, operand.column.quantizer, source, keys, turned)


class NamesKernel:
    """A module whose class names the kernels that compute the same: `class RMSNorm(StreamNorm,
    kernel="norm")`. A subclass may compute otherwise, and inherits no name.
    """

    kernel: ClassVar[str] = ""
    """The kind of `SourceTensors` that those kernels read; "": there are none."""

    def __init_subclass__(cls, *, kernel: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kernel = kernel


def watched(*modules: nn.Module) -> bool:
    """Whether other code sees or replaces the calls of any of the modules: by a hook on it, by one
    on all modules, or by a forward pass of its own (as accelerate gives it). It must be called
    then, so that its input, output and gradients are true tensors: no function computes it.

    torch has no public way to ask. A hook that is registered to see those of others makes backward
    hooks full ones from then on, also when it is removed: torch's own dictionaries are read.
    """
    everywhere: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return everywhere or any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        for module in modules
    )


@dataclass(frozen=True, kw_only=True)
class SourceOutline:
    """A norm or gate as a plan needs it, without its modules, which another rank may hold.

    Args:
        name: name of the module that computes its result otherwise.
        kind: see `FusedLayers.kind`.
        why_never: see `FusedLayers.why_never`.
        readers, writers: names of the layers, if there is no reason `why_never`.
    """

    name: str
    kind: str
    why_never: str | None
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()


def outlines(model: nn.Module) -> tuple[SourceOutline, ...]:
    """The norms and gates of `model` that may quantise their results."""
    names = {module: name for name, module in model.named_modules()}
    return tuple([fused.outline(names[fused.owner]) for fused in fused_layers(model)])


def fused_layers(model: nn.Module) -> Iterator[FusedLayers]:
    """The norms and gates of `model` that may quantise their results for the layers that read
    them, as its modules say.
    """
    for module in model.modules():
        if isinstance(module, FusedLayers) and module.readers:
            yield module


class FusedLayers(nn.Module, ABC):
    """A norm or gate that quantises its result for the layers that read it.

    Parameters and layers are those of other modules, and not registered here.

    Args:
        holder: the module that has them.

    Attributes:
        enabled: whether it may; else the model's modules are called one by one.
        asked: whether the model has asked it for a result, which it may have declined.
        by_backend: whether it quantises in a backend's own kernels.
        why_not_own: why it does not in others; None: it may.
    """

    def __init__(self, holder: nn.Module) -> None:
        super().__init__()
        self._holder = (holder,)  # in a tuple, which registers no module
        self.enabled = False
        self.asked = False
        self.by_backend = False
        self.why_not_own: str | None = None
        # weakly: those that watch a layer (`PlannedLayer.observer`) hold copies of its tensors
        self._seen: tuple[weakref.ref[Executor] | None, ...] = ()
        self._runs = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_seen": (), "_runs": False}

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of the source (`SourceTensors`); "": no kernel reads it."""

    @property
    def owner(self) -> nn.Module:
        """The module that computes the result otherwise, and names it in a plan."""
        return self._holder[0]

    @property
    @abstractmethod
    def readers(self) -> tuple[nn.Module, ...]:
        """The layers that read the result, and alone do."""

    @property
    def writers(self) -> tuple[nn.Module, ...]:
        """Layers whose outputs it is made of, if their gradients are quantised here, too."""
        return ()

    @property
    def replaced(self) -> tuple[nn.Module, ...]:
        """The modules that are not called where its function runs: `watched` ones let none run."""
        return (*self.readers, *self.writers)

    @property
    def layers(self) -> tuple[Linear, ...]:
        """Readers, then writers, of a norm or gate that may be quantised (`why_never`)."""
        return cast(tuple[Linear, ...], (*self.readers, *self.writers))

    def why_never(self) -> str | None:
        """Why the modules that it is made of take no codes, whatever their plan; None: they do."""
        for layer in (*self.readers, *self.writers):
            if not isinstance(layer, PlannedLayer):
                return f"{type(layer).__name__} reads the same values, and takes no codes"
        return None

    def resolve(self, executors: Sequence[Executor]) -> str | None:
        """Why it does not quantise its result for layers with these executors, those of the readers
        first (`why_not`); None: it does.
        """
        count = len(self.readers)
        return why_not(
            executors[:count], executors[count:], self.kind, why_not_own=self.why_not_own
        )

    def outline(self, name: str) -> SourceOutline:
        """What a plan needs to know of it.

        Args:
            name: name of its owner in the model.
        """
        reason = self.why_never()
        if reason is not None:
            return SourceOutline(name=name, kind=self.kind, why_never=reason)
        layers = [layer.layer.name for layer in self.layers]
        count = len(self.readers)
        return SourceOutline(
            name=name,
            kind=self.kind,
            why_never=None,
            readers=tuple(layers[:count]),
            writers=tuple(layers[count:]),
        )

    def ready(self, x: Tensor) -> Ready | None:
        """What a call takes where codes can be made from tensors like x; None: they cannot."""
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or x.dtype is not torch.bfloat16
            or type(x) is not Tensor
            or x.numel() == 0
            or torch_autocasts(x.device.type)
            or torch.is_anomaly_enabled()
            or watched(*self.replaced)
        ):
            return None
        layers = self.layers
        if not all(layer.weight.requires_grad for layer in layers):
            return None
        candidates = [layer.executor_now(x.device, x.dtype) for layer in layers]
        executors = tuple(executor for executor, _ in candidates)
        ready_executors = [executor for executor in executors if executor is not None]
        seen = tuple(
            [None if executor is None else weakref.ref(executor) for executor in executors]
        )
        if seen != self._seen:
            self._runs = (
                len(ready_executors) == len(layers) and self.resolve(ready_executors) is None
            )
            self._seen = seen
            readers = ready_executors[: len(self.readers)]
            self.by_backend = self._runs and why_not_by_backend(readers, self.kind) is None
        if not self._runs:
            return None
        if why_padded(ready_executors, x.numel() // x.shape[-1]) is None:
            return (ready_executors, candidates[0][1])
        return None
