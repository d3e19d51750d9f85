"""Norms in a backend's own kernels, which write the codes that its layers read: see
`nn/produced.py`.

The backend's gates take gate and up as one matrix, and give one gradient. Here these are outputs of
two layers, so gates run in the project's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.nn.call import Executor
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.precision.context import State


def backend_of(executor: Executor) -> BackendLayer | None:
    """The executor if it is a layer of a backend, else None."""
    if isinstance(executor, BackendLayer):
        return executor
    return None


def why_not(readers: Sequence[Executor], *, here: bool = True) -> str | None:
    """Why a backend's own kernel of a norm does not make the x of the readers; None: it does.

    Args:
        readers: at least one.
        here: see `Sources.why_not_given`.
    """
    plan = readers[0].plan
    for reader in readers:
        name = reader.plan.layer.name
        layer = backend_of(reader)
        if layer is None or layer.backend.name != plan.layer_backend:
            return f"{name} runs elsewhere than {plan.layer.name}"
        if (reason := layer.backend.sources.why_no_norm(layer.table, here=here)) is not None:
            return f"{name}: {reason}"
        if layer.dtype is not torch.bfloat16:
            return f"{name} has operands in {layer.dtype}"
    if any(reader.plan.table != plan.table for reader in readers):
        return "the layers that read it do not quantise x alike"
    return None


def norm(h: Tensor, weight_K: Tensor, eps: float, executor: Executor, now: State) -> Tensor:
    """A carrier of RMSNorm(h), whose codes the layers of `executor` take."""
    layer = backend_of(executor)
    assert layer is not None
    normed: Tensor = _Norm.apply(h, weight_K, eps, layer, now)  # type: ignore[no-untyped-call]
    return normed


def carrier_of(like: Tensor) -> Tensor:
    """In the place of a tensor that is not in memory: NaN, of the shape and dtype of `like`."""
    return like.new_full((), torch.nan).expand(like.shape)


def matrix(x: Tensor) -> Tensor:
    """[M, K], its rows contiguous."""
    x = x.detach().reshape(-1, x.shape[-1])
    return x if x.is_contiguous() else x.contiguous()


def _place(layer: BackendLayer, codes: Tensor, now: State, like: Tensor) -> Tensor:
    """Give x to the layers that read it next; returns its carrier, of the shape of `like`."""
    assert now.context is not None
    carrier = carrier_of(like)
    x_MK = carrier.reshape(-1, carrier.shape[-1])
    layer.backend.sources.give(now.context.shared, x_MK, layer.table, codes)
    return carrier


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight_K: Tensor, eps: float, layer: BackendLayer, now: State
    ) -> Tensor:
        ctx.sources = layer.backend.sources
        x, rstd_M = ctx.sources.norm(matrix(h), weight_K.detach(), eps, layer.table)
        ctx.save_for_backward(h, weight_K, rstd_M)
        return _place(layer, x, now, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, weight_K, rstd_M = ctx.saved_tensors
        dh, dweight_K = ctx.sources.norm_backward(matrix(dy), matrix(h), weight_K.detach(), rstd_M)
        return dh.view(h.shape), dweight_K.to(weight_K.dtype), None, None, None
