"""Norms and gates in a backend's own kernels, which write the codes that its layers read: see `nn/produced.py`.

A gate's kernels take gate and up as one matrix [M, 2K] and give one gradient, which they are in layers whose product is
one (`nn/executors/stacked.py`): the node that split the matrix gets the gradient in codes, by the way of two carriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.nn.call import Executor
from fp4train.nn.executors.stacked import JointBackend
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.precision.context import State


def backend_of(executor: Executor) -> BackendLayer | None:
    """The layer of a backend that the executor is, by itself or together with others; None: it is none."""
    layer = executor.alone if isinstance(executor, JointBackend) else executor
    return layer if isinstance(layer, BackendLayer) else None


def why_not(readers: Sequence[Executor], writers: Sequence[Executor], kind: str, *, here: bool = True) -> str | None:
    """Why a backend's own kernels do not make the x of the readers, or, of gate and up, their gradients; None: they do.

    Args:
        readers: not none.
        writers: of gate and up.
        kind: of the source (`SourceTensors`).
        here: see `Sources.why_not_given`.
    """
    first = readers[0]
    for each in (*readers, *writers):
        name, layer = each.plan.layer.name, backend_of(each)
        if layer is None or layer.backend.name != first.plan.layer_backend:
            return f"{name} runs elsewhere than {first.plan.layer.name}"
        if (reason := layer.backend.sources.why_no_kernel(kind, layer.table, here=here)) is not None:
            return f"{name}: {reason}"
        if layer.dtype is not torch.bfloat16:
            return f"{name} has operands in {layer.dtype}"
    if any(each.plan.table != first.plan.table for each in readers):
        return "the layers that read it do not quantise x alike"
    names = tuple(each.plan.layer.name for each in writers)
    if any(not isinstance(each, JointBackend) or each.plan.readers != names for each in writers):
        return "the layers of its two halves are not one product (train.joint_products=true)"
    return None


def norm(h: Tensor, weight_K: Tensor, eps: float, executor: Executor, now: State) -> Tensor:
    """A carrier of RMSNorm(h), whose codes the layers of `executor` take."""
    layer = backend_of(executor)
    assert layer is not None
    made: Tensor = _Norm.apply(h, weight_K, eps, layer, now)  # type: ignore[no-untyped-call]
    return made


def gate(gate: Tensor, up: Tensor, executors: Sequence[Executor], now: State) -> Tensor | None:
    """A carrier of silu(gate) ⊙ up, whose codes the layer of the first of `executors` takes; None: gate and up are not
    columns of one output of the layers of the others, which take one gradient in codes."""
    reader, writer = (backend_of(each) for each in executors[:2])
    node = _node(gate)
    if reader is None or writer is None or node is not _node(up) or not hasattr(node, "given"):
        return None
    made: Tensor = _Gate.apply(gate, up, node, writer, reader, now)  # type: ignore[no-untyped-call]
    return made


def carrier_of(like: Tensor) -> Tensor:
    """In the place of a tensor that is not in memory: NaN, of the shape and dtype of `like`."""
    return like.new_full((), torch.nan).expand(like.shape)


def matrix(x: Tensor) -> Tensor:
    """[M, K], its rows contiguous."""
    x = x.detach().reshape(-1, x.shape[-1])
    return x if x.is_contiguous() else x.contiguous()


def _node(y: Tensor) -> Any:
    """The node in the graph whose output y is, as it is or as a view."""
    node: Any = y.grad_fn
    if node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    return node


def _place(layer: BackendLayer, codes: Tensor, now: State, like: Tensor) -> Tensor:
    """Give x to the layers that read it next; returns its carrier, of the shape of `like`."""
    assert now.context is not None
    carrier = carrier_of(like)
    x_MK = carrier.reshape(-1, carrier.shape[-1])
    layer.backend.sources.give(now.context.shared, x_MK, layer.table, codes)
    return carrier


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight_K: Tensor, eps: float, layer: BackendLayer, now: State) -> Tensor:
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


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, node: Any, writer: BackendLayer, reader: BackendLayer, now: State
    ) -> Tensor:
        size = gate.shape[-1]
        rows = gate.numel() // size
        y_MN = gate.detach().as_strided((rows, 2 * size), (2 * size, 1), gate.storage_offset())
        ctx.writer, ctx.node = writer, node
        ctx.save_for_backward(y_MN)
        return _place(reader, reader.backend.sources.gate(y_MN, reader.table), now, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        (y_MN,) = ctx.saved_tensors
        dy_MN = ctx.writer.backend.sources.gate_backward(matrix(dx), y_MN, ctx.writer.table)
        carriers = [carrier_of(dx), carrier_of(dx)]
        ctx.node.given = [each.reshape(-1, dx.shape[-1]) for each in carriers], dy_MN
        return *carriers, None, None, None, None
