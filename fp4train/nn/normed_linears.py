"""Linear layers that read one norm, and nothing else does: the norm's codes are made where it is
computed, and stay in the context of one autograd function.

    h = x + change    n = RMSNorm(h)    y_i = n·w_iᵀ

A block says which: `NormedLinears(self, "attention_norm", "attention")`, and that module names them
as its `input_layers`. The result, in the place of n, is `LayerOutputs` for the forward pass of that
module, which asks for them by `outputs_of`.
Where the codes cannot be made, or hooks watch one of the modules, the norm is called by itself, and
the module gets n.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fp4train.nn.engine import LayerFunction
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.fused_layers import (
    FusedLayers,
    LayerOutputs,
    ModuleOutput,
    has_hooks,
    overrides,
)
from fp4train.nn.fused_norm import (
    BackendNorm,
    KernelNorm,
    NormCodesCall,
    NormedCall,
    multiplied_codes,
    parameters_of,
)
from fp4train.nn.gated_mlp import GatedMLP
from fp4train.quantize.quantizer import PLAIN

StreamOrTerms = Tensor | tuple[Tensor, Tensor]
"""The residual stream [..., K], or its two terms: x and change."""


class NormedLinears(FusedLayers):
    """(n or `LayerOutputs`, h) of a residual stream.

    Args:
        block: the module that has norm and reader.
        norm: name in it of the norm, with `of_stream(stream)` → (n, h), and `source`, its kind of
            `SourceTensors`, or "". A subclass that overrides what the norm computes sets its own.
        reader: name in it of the module that is called with n. The layers that read n are its
            `input_layers`, names in it; without these it is not said.
    """

    def __init__(self, block: nn.Module, norm: str, reader: str) -> None:
        super().__init__(block)
        self._names = (norm, reader)

    @property
    def kind(self) -> str:
        if overrides(self.owner, "source", "normalised", "of_stream", "forward"):
            return ""
        return str(getattr(self.owner, "source", ""))

    @property
    def owner(self) -> nn.Module:
        norm: nn.Module = getattr(self._holder[0], self._names[0])
        return norm

    @property
    def reader(self) -> nn.Module:
        """The module that is called with n."""
        reader: nn.Module = getattr(self._holder[0], self._names[1])
        return reader

    @property
    def readers(self) -> tuple[Any, ...]:
        reader = self.reader
        return tuple([attrgetter(name)(reader) for name in getattr(reader, "input_layers", ())])

    def why_never(self) -> str | None:
        if self.kind not in ("norm", "root"):
            return f"no kernel computes {type(self.owner).__name__}"
        reason = super().why_never()
        if reason is None and not _takes_outputs(self.reader):
            return (
                f"the forward pass of {type(self.reader).__name__} takes no outputs of its layers"
            )
        return reason

    def forward(self, stream: StreamOrTerms) -> tuple[Any, Tensor]:
        norm: Any = self.owner
        if self.enabled and (fused := self._fused(norm, stream)) is not None:
            return fused
        unfused: tuple[Tensor, Tensor] = norm.of_stream(stream)
        return unfused

    def _fused(self, norm: Any, stream: StreamOrTerms) -> tuple[Any, Tensor] | None:
        """The result where the norm is quantised; None: it is not."""
        if not self.asked:
            self.asked = True
        x, change = stream if isinstance(stream, tuple) else (stream, None)
        reader = self.reader
        if (
            norm.eps is None
            or type(norm.weight) not in PLAIN
            or not (change is None or _adds(x, change))
            or has_hooks(norm)
            or has_hooks(reader)
            or self.kind not in ("norm", "root")
            or not _takes_outputs(reader)
        ):
            return None
        ready = self.ready(x)
        if ready is None:
            return None
        executors, now = ready
        layers = self.readers
        weight_K = norm.weight
        first_reader = executors[0]
        if isinstance(first_reader, BackendLayer):
            return self._by_backend_layers(norm, x, change, executors, now)
        assert isinstance(first_reader, Gemms)
        kernels = KernelNorm(self.kind, norm.eps, first_reader)
        mlp = getattr(reader, "fused", None)
        if isinstance(mlp, GatedMLP) and (ready_mlp := mlp.ready_for(x, normed=True)) is not None:
            y, h = mlp.multiplied(ready_mlp, x, change, weight_K, kernels)
            assert h is not None
            return ModuleOutput(y), h
        tokens = x.numel() // x.shape[-1]
        calls = [
            layer.call_in(now, executor, tokens)
            for layer, executor in zip(layers, executors, strict=True)
        ]
        *outputs, h = LayerFunction.apply(  # type: ignore[no-untyped-call]
            NormedCall(kernels, calls), x, change, weight_K, *parameters_of(layers)
        )
        return LayerOutputs(tuple([y.view(*x.shape[:-1], y.shape[-1]) for y in outputs])), h

    def _by_backend_layers(
        self, norm: Any, x: Tensor, change: Tensor | None, executors: Sequence[Any], now: Any
    ) -> tuple[LayerOutputs, Tensor]:
        """The outputs of layers whose GEMMs a backend runs together."""
        shape = x.shape[:-1]
        count = len(executors)
        if self.by_backend:
            # its kernel takes no gradient of h: autograd adds that of the stream
            h = x if change is None else x + change
            call = NormCodesCall(BackendNorm(self.kind, norm.eps, executors[0]), count)
            *codes, _ = LayerFunction.apply(call, h, None, norm.weight)  # type: ignore[no-untyped-call]
        else:
            call = NormCodesCall(KernelNorm(self.kind, norm.eps, executors[0]), count)
            *codes, h = LayerFunction.apply(call, x, change, norm.weight)  # type: ignore[no-untyped-call]
        outputs = multiplied_codes(self.readers, executors, codes, now)
        return LayerOutputs(tuple([y.view(*shape, y.shape[-1]) for y in outputs])), h


def _adds(x: Tensor, change: Tensor) -> bool:
    """Whether a kernel adds the change to x."""
    return (type(change), change.dtype, change.shape) == (type(x), x.dtype, x.shape)


def _takes_outputs(reader: nn.Module) -> bool:
    return getattr(reader.forward, "takes_outputs", False)
