"""The codes of a norm and its gradients (`KernelNorm`, `BackendNorm`), and the autograd functions
of norm and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends.protocol import CodePair
from fp4train.nn.backend_sources import matrix
from fp4train.nn.call import gradient_dtypes
from fp4train.nn.executors.gemms import (
    flatten,
    sum_so_far,
    summed_parameter,
    unflatten,
    without_torchs_autocast,
)
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.fused_layers import CodeReader, forms_from
from fp4train.precision.context import State
from fp4train.quantize import produced
from fp4train.quantize.produced import SourceTensors


class NormCodes(Protocol):
    """A norm whose result n is made as codes."""

    def codes(
        self, x: Tensor, change: Tensor | None, weight_K: Tensor
    ) -> tuple[Any, Tensor, Tensor]:
        """(The codes of n, the sum h of x and change, 1/√(mean(h²) + ε) of each token)."""

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(The gradient of h, to which `added` is added, that of the weight)."""


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
    ) -> tuple[Any, Tensor, Tensor]:
        h = x if change is None else x.new_empty(x.shape)
        terms = () if change is None else (x, change)
        h_MK = matrix(h)
        rstd_M = torch.empty(h_MK.shape[0], dtype=torch.float32, device=h.device)
        tensors = (h_MK, weight_K.detach(), rstd_M, *map(matrix, terms))
        source = SourceTensors(self.kind, tensors, self.eps)
        (forms,) = forms_from(source, self.reader, "x", (None,))
        if isinstance(self.reader, BackendLayer):
            return self.reader.given(cast(CodePair, forms), h_MK.shape), h, rstd_M
        return forms, h, rstd_M

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
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
class BackendNorm:
    """RMSNorm by a backend's own kernels, which add nothing up; its codes are the backend's
    tensor.
    """

    eps: float
    reader: BackendLayer

    def codes(
        self, x: Tensor, change: Tensor | None, weight_K: Tensor
    ) -> tuple[Any, Tensor, Tensor]:
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


class NormedFunction(torch.autograd.Function):
    """(y [M, N] of each layer, h) of (x, change, weight of the norm, norm, calls of the layers,
    their weights, their biases).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor | None,
        weight_K: Tensor,
        norm: NormCodes,
        calls: Sequence[Any],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = cast(Sequence[Tensor], parameters[: len(calls)])
        biases = parameters[len(calls) :]
        forms, h, rstd_M = norm.codes(x, change, weight_K)
        h_MK = matrix(h)
        outputs = []
        for call, w_NK, bias_N in zip(calls, weights, biases, strict=True):
            trains_bias = bias_N is not None and bias_N.requires_grad
            call.gradients = gradient_dtypes(h_MK, w_NK, bias_N, (True, True, trains_bias))
            # h stands for n, whose codes are there; layers that share an input must not find them.
            call.shared = None
            y_MN, _ = call.executor.forward(h_MK, w_NK, bias_N, call, lambda *_: forms)
            outputs.append(y_MN)
        saved, ctx.heads = flatten((forms[1],))
        ctx.save_for_backward(h, weight_K, rstd_M, *weights, *saved)
        ctx.set_materialize_grads(False)
        ctx.summed = [
            summed_parameter(call, w_NK) if call.executor.adds else None
            for call, w_NK in zip(calls, weights, strict=True)
        ]
        ctx.first_weight = 2 if change is None else 3
        ctx.norm = norm
        ctx.calls = calls
        return (*outputs, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *dys, added = gradients
        h, weight_K, rstd_M, *tensors = ctx.saved_tensors
        count = len(ctx.calls)
        weights = tensors[:count]
        codes = unflatten(tensors[count:], ctx.heads)
        dn: Tensor | None = None
        dws: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * count
        for number in reversed(range(count)):
            dy_MN = dys[number]
            if dy_MN is None:
                continue
            call = ctx.calls[number]
            sum_NK = None
            if ctx.summed[number] is not None:
                node = ctx.next_functions[ctx.first_weight + number][0]
                sum_NK = sum_so_far(ctx.summed[number], node)
            with without_torchs_autocast(dy_MN.device.type):
                dx_MK, dws[number], dbiases[number] = call.executor.backward(
                    dy_MN, weights[number], codes, call, total_NK=sum_NK
                )
            # The first product's memory has the sum, in the order of `total`.
            if dn is None:
                dn = dx_MK
            else:
                dn += dx_MK
            del dx_MK
        del tensors, weights, codes
        dh, dweight = added, None
        if dn is not None:
            dh, dweight = ctx.norm.backward(dn, h, weight_K, rstd_M, added)
        return dh, dh if ctx.needs_input_grad[1] else None, dweight, None, None, *dws, *dbiases


class NormCodesFunction(torch.autograd.Function):
    """(The codes of n as tensors of a backend, one for each of `count` layers, h) of (x, change,
    weight of the norm, norm, count).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor | None,
        weight_K: Tensor,
        norm: NormCodes,
        count: int,
    ) -> tuple[Tensor, ...]:
        codes, h, rstd_M = norm.codes(x, change, weight_K)
        ctx.save_for_backward(h, weight_K, rstd_M)
        ctx.set_materialize_grads(False)
        ctx.norm = norm
        return (*[codes.detach() for _ in range(count)], h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *dns, added = gradients
        dn = total(dns)
        dh, dweight = added, None
        if dn is not None:
            h, weight_K, rstd_M = ctx.saved_tensors
            dh, dweight = ctx.norm.backward(dn, h, weight_K, rstd_M, added)
        return dh, dh if ctx.needs_input_grad[1] else None, dweight, None, None


def multiplied_codes(
    layers: Sequence[Any], executors: Sequence[BackendLayer], codes: Sequence[Tensor], now: State
) -> list[Tensor]:
    """y [M, N] of layers that take x as codes, each as a tensor of its own."""
    outputs = [
        executor.of_codes(layer, codes_MK, layer.w_NK, layer.bias, now)
        for layer, executor, codes_MK in zip(layers, executors, codes, strict=True)
    ]
    executors[0].backend.sources.close(codes)
    return outputs
