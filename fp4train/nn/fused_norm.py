"""The codes of a norm and its gradients (`KernelNorm`, `BackendNorm`), and the calls of the engine
that make them, for layers that run three GEMMs and for those of a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fp4train.backends.protocol import CodePair
from fp4train.nn.backend_sources import matrix
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import CodesOf, Nodes, ProductExecutor, Saved, sum_so_far
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.fused_layers import CodeReader, forms_from
from fp4train.nn.linear import Linear
from fp4train.precision.context import State
from fp4train.quantize import produced
from fp4train.quantize.produced import SourceTensors


@dataclass(frozen=True)
class KernelNorm:
    """A norm by fp4train's kernels, whose codes are both forms of n.

    Args:
        kind: "norm" or "root" (`SourceTensors`).
        reader: executor of a layer that takes the codes.
    """

    kind: str
    eps: float
    reader: CodeReader

    def codes(
        self, x: Tensor, change: Tensor | None, weight_K: Tensor
    ) -> tuple[CodePair | Tensor, Tensor, Tensor]:
        """(The codes of n, the sum h of x and change, 1/√(mean(h²) + ε) of each token)."""
        h = x if change is None else x.new_empty(x.shape)
        terms = () if change is None else (x, change)
        h_MK = matrix(h)
        rstd_M = torch.empty(h_MK.shape[0], dtype=torch.float32, device=h.device)
        tensors = (h_MK, weight_K.detach(), rstd_M, *map(matrix, terms))
        source = SourceTensors(self.kind, tensors, self.eps)
        (forms,) = forms_from(source, self.reader, "x", (None,))
        if isinstance(self.reader, BackendLayer):
            return self.reader.given(forms, h_MK.shape), h, rstd_M
        return forms, h, rstd_M

    def source(self, h: Tensor, weight_K: Tensor, rstd_M: Tensor) -> SourceTensors:
        """What n is made of, after `codes`."""
        return SourceTensors(self.kind, (matrix(h), weight_K.detach(), rstd_M), self.eps)

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(The gradient of h, to which `added` is added, that of the weight)."""
        dh_MK, dweight_K = produced.norm_backward(
            matrix(dn),
            matrix(h),
            weight_K.detach(),
            rstd_M,
            outside=self.eps if self.kind == "root" else 0.0,
            added_MK=None if added is None else matrix(added),
        )
        return dh_MK.view(h.shape), dweight_K.to(weight_K.dtype)


@dataclass(frozen=True)
class BackendNorm(KernelNorm):
    """RMSNorm by a backend's own kernels, which add nothing up; its codes are the backend's
    tensor.
    """

    reader: BackendLayer

    def codes(
        self, x: Tensor, change: Tensor | None, weight_K: Tensor
    ) -> tuple[CodePair | Tensor, Tensor, Tensor]:
        assert change is None
        sources = self.reader.backend.sources
        codes, rstd_M = sources.norm(matrix(x), weight_K.detach(), self.eps, self.reader.table)
        return codes, x, rstd_M

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert added is None
        sources = self.reader.backend.sources
        dh_MK, dweight_K = sources.norm_backward(matrix(dn), matrix(h), weight_K.detach(), rstd_M)
        return dh_MK.view(h.shape), dweight_K.to(weight_K.dtype)


def total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the gradients of one tensor in the order in which autograd adds them up, that of
    its last reader first; None: there are none.
    """
    present = [gradient for gradient in reversed(gradients) if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    result = present[0] + present[1]
    for gradient in present[2:]:
        result += gradient
    return result


@dataclass(frozen=True)
class MadeForms:
    """Both forms of a tensor that is nowhere in memory: the `codes_of` of the layers that take it.

    Args:
        source: the tensors that it is made of; None: nobody asks for its values.
        number: its place among the results of the source.
    """

    forms: CodePair
    source: SourceTensors | None = None
    number: int = 0

    def __call__(self, *_: Any) -> CodePair:
        return self.forms

    def values(self) -> Tensor | None:
        """The tensor in BF16, computed by the readable reference in main memory; None: its source
        is not there.
        """
        if self.source is None:
            return None
        tensors = [tensor.detach().to("cpu", copy=True) for tensor in self.source.tensors]
        return self.source._replace(tensors=tuple(tensors)).values()[self.number]


class FusedCall:
    """A call of the engine that is its own executor.

    Attributes:
        norm: norm whose codes it makes; None: it makes those of none.
        adds: whether products add dw to the sums of gradients.
        device: device type of its tensors.
        needs_grad: whether each tensor needs a gradient.
    """

    norm: KernelNorm | None = None
    adds = False
    device = ""
    needs_grad: Sequence[bool] = ()

    @property
    def executor(self) -> FusedCall:
        return self

    def wants(self, needs_grad: Sequence[bool], x: Tensor, *tensors: Any) -> None:
        """See `engine.Call`."""
        self.needs_grad = needs_grad
        self.device = x.device.type

    def norm_backward(
        self, dn: Tensor | None, added: Tensor | None, h: Any, weight_K: Any, rstd_M: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, of change and of the norm's weight."""
        dh = added if dn is None else dn
        dweight = None
        if self.norm is not None and dn is not None:
            dh, dweight = self.norm.backward(dn, h, weight_K, rstd_M, added)
        return dh, dh if self.needs_grad[1] else None, dweight


class NormedCall(FusedCall):
    """(y [M, N] of each layer, h) of (x, change, weight of the norm, then weight and bias of each
    layer).

    Args:
        norm: norm of h = x + change, whose codes the layers take; None: they read x [M, K].
        calls: their calls.
    """

    def __init__(self, norm: KernelNorm | None, calls: Sequence[LayerCall]) -> None:
        self.norm = norm
        self.calls = calls
        self.adds = any(call.executor.adds for call in calls)

    def wants(self, needs_grad: Sequence[bool], x: Tensor, *tensors: Any) -> None:
        super().wants(needs_grad, x)
        for call, at in zip(self.calls, range(3, len(needs_grad), 2), strict=True):
            call.wants((True, True, needs_grad[at + 1]), x, *tensors[at - 1 : at + 1])
            # h stands for n, whose codes are there; layers that share an input must not find them.
            if self.norm is not None:
                call.shared = None

    def summed(self, *tensors: Any) -> list[tuple[Any, int]]:
        """Each weight as `sum_so_far` takes it, None without a sum, and the number of its node."""
        weights = []
        for call, at in zip(self.calls, range(3, len(tensors), 2), strict=True):
            node = sum(tensor is not None for tensor in tensors[:at])
            w_NK = call.summed(tensors[0], *tensors[at : at + 2]) if call.executor.adds else None
            weights.append((w_NK, node))
        return weights

    def sums(self, summed: Sequence[tuple[Any, int]], nodes: Nodes) -> list[Tensor | None]:
        """See `engine.Call`."""
        return [
            None if w_NK is None else sum_so_far(w_NK, nodes[number][0]) for w_NK, number in summed
        ]

    def forward(self, *arguments: Any) -> tuple[tuple[Any, ...], Saved]:
        outputs, saved = self.multiply(*arguments[:-1])
        return (*outputs, saved[0]), saved

    def multiply(
        self, x: Tensor, change: Tensor | None, weight_K: Any, *parameters: Any
    ) -> tuple[list[Tensor], list[Any]]:
        """(the outputs of the layers, what backward needs: h, weight and 1/√(mean + ε) of the norm,
        then weight and codes of each layer).
        """
        saved: list[Any] = [None, None, None]
        codes_of: CodesOf | None = None
        if self.norm is not None:
            forms, x, rstd_M = self.norm.codes(x, change, weight_K)
            codes_of = MadeForms(cast(CodePair, forms), self.norm.source(x, weight_K, rstd_M))
            saved = [x, weight_K, rstd_M]
        x_MK = matrix(x)
        outputs = []
        for call, w_NK, bias_N in zip(self.calls, parameters[::2], parameters[1::2], strict=True):
            products = cast(ProductExecutor, call.executor)
            y_MN, of_layer = products.forward(x_MK, w_NK, bias_N, call, codes_of)
            outputs.append(y_MN)
            saved += of_layer
        return outputs, saved

    def backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        *dys, added, saved, _, sums = arguments
        dn, gradients = self.multiply_backward(dys, saved[3:], sums)
        return *self.norm_backward(dn, added, *saved[:3]), *gradients

    def multiply_backward(
        self,
        dys: Sequence[Tensor | None],
        saved: Sequence[Any],
        sums: Sequence[Tensor | None] | None,
        codes: list[MadeForms] | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """(the gradient of what the layers read, those of weight and bias of each).

        Args:
            saved: weight and codes of each layer.
            codes: the forms of each dy, which are dropped as they are used; None: dy is quantised.
        """
        dn: Tensor | None = None
        gradients: list[Tensor | None] = [None] * (2 * len(dys))
        for number in reversed(range(len(dys))):
            dy_MN = dys[number]
            codes_of = codes.pop() if codes else None
            if dy_MN is None:
                continue
            call = self.calls[number]
            at = slice(2 * number, 2 * number + 2)
            total = None if sums is None else sums[number]
            products = cast(ProductExecutor, call.executor)
            dx_MK, *gradients[at] = products.backward(dy_MN, saved[at], call, total, codes_of)
            assert dx_MK is not None
            # The first product's memory has the sum, in the order of `total`.
            if dn is None:
                dn = dx_MK
            else:
                dn += dx_MK
            del dx_MK
        return dn, gradients


class NormCodesCall(FusedCall):
    """(The codes of n as tensors of a backend, one for each of `count` layers, h) of (x, change,
    weight of the norm).
    """

    norm: KernelNorm

    def __init__(self, norm: KernelNorm, count: int) -> None:
        self.norm = norm
        self.count = count

    def forward(
        self, x: Tensor, change: Tensor | None, weight_K: Tensor, call: FusedCall
    ) -> tuple[tuple[Tensor, ...], Saved]:
        codes_or_forms, h, rstd_M = self.norm.codes(x, change, weight_K)
        codes = cast(Tensor, codes_or_forms)
        return (*[codes.detach() for _ in range(self.count)], h), (h, weight_K, rstd_M)

    def backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        *dns, added, saved, _, _ = arguments
        return self.norm_backward(total(dns), added, *saved)


def parameters_of(layers: Iterable[Linear]) -> list[Tensor | None]:
    """Weight and bias of each layer."""
    return [tensor for layer in layers for tensor in (layer.w_NK, layer.bias)]


def multiplied_codes(
    layers: Sequence[Linear],
    executors: Sequence[BackendLayer],
    codes: Sequence[Tensor],
    now: State,
) -> list[Tensor]:
    """y [M, N] of layers that take x as codes, each as a tensor of its own."""
    assert now.context is not None
    outputs = []
    for layer, executor, codes_MK in zip(layers, executors, codes, strict=True):
        call = layer.new_call(now.context, executor, 0, training=False)
        outputs.append(executor.multiplied(codes_MK, layer.w_NK, layer.bias, call, 0))
    executors[0].backend.sources.close(codes)
    return outputs
