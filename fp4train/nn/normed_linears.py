"""Linear layers that read one norm, and nothing else does: the norm's codes are made where it is
computed, and stay in the context of one autograd function.

    h = x + change    n = RMSNorm(h)    y_i = n·w_iᵀ

A `Mixer` says which layers read its input, and what it makes of their outputs. Its block calls it
through a `NormedLinears(self, "attention_norm", "attention")`, which gives the mixer's result for
the norm of the stream, and the stream. Where the codes cannot be made, or one of the modules is
`watched`, it calls the norm and the mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from fp4train.nn.engine import LayerFunction
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.fused_layers import FusedLayers, NamesKernel, Ready, watched
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


class Mixer(NamesKernel, nn.Module):
    """A module whose input its `input_layers` read, and nothing else does:
    y = mixed(their outputs, further arguments).

    A subclass gives `mixed`. With a forward pass of its own it gives both, or is called with its
    input, as any module.
    """

    input_layers: tuple[str, ...] = ()
    """Names of the layers that read the input."""

    mixed: Callable[..., Tensor]
    """y [..., width] of the outputs of the input layers, and of what `forward` takes beside x."""

    by_mixed: ClassVar[Callable[..., Tensor] | None]
    """The forward pass that `mixed` computes after the input layers; None: it computes another."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.by_mixed = cls.forward if "mixed" in vars(cls) else None

    @property
    def takes_outputs(self) -> bool:
        """Whether `mixed` computes what `forward` does after the input layers. It may not where
        another base class, or code that replaces it in this class, gives the forward pass.
        """
        return type(self).forward is type(self).by_mixed

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """y of x [..., width]."""
        outputs = [getattr(self, name)(x) for name in self.input_layers]
        return self.mixed(*outputs, *arguments, **options)

    by_mixed = forward


class ReadsStream(Protocol):
    """A norm of a residual stream h (`models.common.stream.StreamNorm`)."""

    weight: Tensor
    eps: float | None

    def of_stream(self, stream: StreamOrTerms) -> tuple[Tensor, Tensor]:
        """(n, h)."""


class NormedLinears(FusedLayers):
    """(y of a reader that is called with the norm of h, h) of a residual stream h.

    Args:
        block: the module that has norm and reader.
        norm: name in it of the norm, a `ReadsStream` whose class names its kernels ("norm",
            "root").
        reader: name in it of the module that is called with n. The layers that read n are its
            `input_layers`, names in it; a reader without them is called with n.
    """

    def __init__(self, block: nn.Module, norm: str, reader: str) -> None:
        super().__init__(block)
        self._names = (norm, reader)

    @property
    def kind(self) -> str:
        return str(getattr(self.owner, "kernel", ""))

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
    def readers(self) -> tuple[nn.Module, ...]:
        reader = self.reader
        return tuple([attrgetter(name)(reader) for name in getattr(reader, "input_layers", ())])

    @property
    def replaced(self) -> tuple[nn.Module, ...]:
        return (self.owner, self.reader, *self.readers)

    def why_never(self) -> str | None:
        if self.kind not in ("norm", "root"):
            return f"no kernel computes {type(self.owner).__name__}"
        reason = super().why_never()
        if reason is None and not _takes_outputs(self.reader):
            return (
                f"the forward pass of {type(self.reader).__name__} takes no outputs of its layers"
            )
        return reason

    def forward(
        self, stream: StreamOrTerms, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """(y, h); the reader takes the further arguments."""
        norm = cast(ReadsStream, self.owner)
        reader = self.reader
        if self.enabled:
            x, change = _terms(stream)
            ready = self._ready_for(norm, reader, x, change)
            if ready is not None:
                mixer = cast(Mixer, reader)
                return self._in_codes(norm, mixer, x, change, ready, arguments, options)
        n, h = norm.of_stream(stream)
        if torch.compiler.is_compiling() and _takes_outputs(reader) and not watched(reader):
            # One graph has the norm and these layers also where `mixed` breaks it (a scan's kernels).
            outputs = [layer(n) for layer in self.readers]
            return cast(Mixer, reader).mixed(*outputs, *arguments, **options), h
        return reader(n, *arguments, **options), h

    def _in_codes(
        self,
        norm: ReadsStream,
        mixer: Mixer,
        x: Tensor,
        change: Tensor | None,
        ready: Ready,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """(y, h), the norm in codes alone; so is the product of a gated MLP, where it can be."""
        gated = _gated_mlp(mixer)
        if isinstance(ready[0][0], BackendLayer):
            outputs, h = self._by_backend_layers(norm, x, change, ready)
            y = None if gated is None else gated.of_outputs(*outputs)
            if y is not None:
                return y, h
        else:
            assert norm.eps is not None
            kernels = KernelNorm(self.kind, norm.eps, cast(Gemms, ready[0][0]))
            ready_mlp = None if gated is None else gated.ready_for(x, normed=True)
            if gated is not None and ready_mlp is not None:
                return gated.normed(ready_mlp, x, change, norm.weight, kernels)
            outputs, h = self._by_gemms(kernels, norm.weight, x, change, ready)
        return mixer.mixed(*outputs, *arguments, **options), h

    def _ready_for(
        self, norm: ReadsStream, reader: nn.Module, x: Tensor, change: Tensor | None
    ) -> Ready | None:
        """See `ready`; None also where no kernel computes this norm of these tensors."""
        if not self.asked:
            self.asked = True
        if (
            self.kind not in ("norm", "root")
            or norm.eps is None
            or type(norm.weight) not in PLAIN
            or not (change is None or _adds(x, change))
            or not _takes_outputs(reader)
        ):
            return None
        return self.ready(x)

    def _by_gemms(
        self,
        kernels: KernelNorm,
        weight_K: Tensor,
        x: Tensor,
        change: Tensor | None,
        ready: Ready,
    ) -> tuple[list[Tensor], Tensor]:
        """(The outputs of layers that run three GEMMs of their own, h)."""
        executors, now = ready
        layers = self.layers
        tokens = x.numel() // x.shape[-1]
        calls = [
            layer.call_in(now, executor, tokens)
            for layer, executor in zip(layers, executors, strict=True)
        ]
        *outputs, h = LayerFunction.apply(  # type: ignore[no-untyped-call]
            NormedCall(kernels, calls), x, change, weight_K, *parameters_of(layers)
        )
        return _shaped(outputs, x), h

    def _by_backend_layers(
        self, norm: ReadsStream, x: Tensor, change: Tensor | None, ready: Ready
    ) -> tuple[list[Tensor], Tensor]:
        """(The outputs of layers whose GEMMs a backend runs together, h)."""
        executors, now = ready
        layers = cast(Sequence[BackendLayer], executors)
        count = len(layers)
        assert norm.eps is not None
        if self.by_backend:
            # its kernel takes no gradient of h: autograd adds that of the stream
            h = x if change is None else x + change
            call = NormCodesCall(BackendNorm(self.kind, norm.eps, layers[0]), count)
            *codes, _ = LayerFunction.apply(call, h, None, norm.weight)  # type: ignore[no-untyped-call]
        else:
            call = NormCodesCall(KernelNorm(self.kind, norm.eps, layers[0]), count)
            *codes, h = LayerFunction.apply(call, x, change, norm.weight)  # type: ignore[no-untyped-call]
        return _shaped(multiplied_codes(self.layers, layers, codes, now), x), h


def _terms(stream: StreamOrTerms) -> tuple[Tensor, Tensor | None]:
    """The terms x and change of a stream, whose change is None if it is one tensor."""
    if isinstance(stream, tuple):
        return stream
    return stream, None


def _gated_mlp(mixer: Mixer) -> GatedMLP | None:
    """What quantises the product of a gated MLP; None: the mixer is none."""
    fused = getattr(mixer, "fused", None)
    return fused if isinstance(fused, GatedMLP) else None


def _adds(x: Tensor, change: Tensor) -> bool:
    """Whether a kernel adds the change to x."""
    return (type(change), change.dtype, change.shape) == (type(x), x.dtype, x.shape)


def _shaped(outputs: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Outputs [M, N] of layers that read x [..., K], as [..., N]."""
    return [y_MN.view(*x.shape[:-1], y_MN.shape[-1]) for y_MN in outputs]


def _takes_outputs(reader: nn.Module) -> bool:
    return isinstance(reader, Mixer) and reader.takes_outputs
