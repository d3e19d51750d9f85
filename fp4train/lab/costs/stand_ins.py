"""What GPUs run as one kernel, on the meta device: functions that read, write and keep what the
kernels do, and the counter of what operators move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4train.models.common.liger import Liger
from fp4train.models.common.stream import StreamTerms, summed
from fp4train.quantize.produced import ADDED, NORM_BACKWARD, SUM


@dataclass(kw_only=True)
class PassWork:
    """What the operations between the products of one pass take, before any splitting.

    Args:
        operators: bytes that operators read and write, each by itself.
        kernels: bytes that kernels of several operations read and write.
        flops: floating-point operations of products and Fourier transforms, in float32.
        attention: floating-point operations of attention, half of the square if causal.
        launches: kernels that the host queues.
    """

    operators: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0
    attention: float = 0.0
    launches: int = 0


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of operators; views and allocations have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = PassWork()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in str(func):
            return out
        self.work.launches += 1
        self.work.operators += _bytes(tree_leaves((args, kwargs, out)))
        self.work.flops += _flops(func.overloadpacket, args, out)
        return out


def _bytes(values: Sequence[Any]) -> float:
    """Bytes of the tensors among the values; expanded ones have those of their storage."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1}
"""Operation → the place of its left factor, whose last dimension is summed over."""


def _flops(operation: Any, args: Any, out: Any) -> float:
    """Floating-point operations of a product, or of a Fourier transform of n real values
    (2.5·n·log₂n); 0 for others."""
    place = _PRODUCTS.get(operation)
    if place is not None:
        return float(2 * out.numel() * args[place].shape[-1])
    if operation in (_ATEN._fft_r2c, _ATEN._fft_c2r):
        real = args[0] if operation is _ATEN._fft_r2c else out
        length = math.prod(real.shape[axis] for axis in args[1])
        return float(2.5 * real.numel() * math.log2(max(2, length)))
    return 0.0


class LayerStandIn(torch.autograd.Function):
    """A planned layer of x, which keeps `kept` for wgrad and returns [..., out_features]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, out_features: int) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.dx = x.new_empty(x.shape)
        return x.new_empty((*x.shape[:-1], out_features))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return torch.empty_like(ctx.dx), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, time, _ = q.shape
        # The layout of the kernels: heads of a token lie side by side.
        out = q.new_empty((batch, time, heads, v.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _Kernel(torch.autograd.Function):
    """A kernel each way, with results like the first of its inputs.

    Args:
        moves: bytes forward and backward; None: those of what it reads and writes.
        keep: function that says which of its inputs and results it keeps for backward.
        results: number of results.
        gradients: number of gradients that backward writes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        counter: WorkCounter,
        moves: tuple[float, float] | None,
        keep: Callable[..., tuple[Tensor, ...]],
        results: int,
        gradients: int,
        *inputs: Tensor,
    ) -> Any:
        outs = [torch.empty_like(tensor) for tensor in inputs[:results]]
        kept = keep(inputs, outs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.counter = counter
        ctx.inputs = inputs
        read = _bytes([*kept, *outs])
        if moves is None:
            ctx.moved = read + _bytes(inputs[:gradients])
        else:
            ctx.moved = moves[1]
        counter.work.kernels += _bytes([*inputs, *outs]) if moves is None else moves[0]
        counter.work.launches += 1
        return outs[0] if results == 1 else tuple(outs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counter.work.kernels += ctx.moved
        ctx.counter.work.launches += 1
        return *(None,) * 5, *(torch.empty_like(tensor) for tensor in ctx.inputs)


def _kernel(
    counter: WorkCounter,
    moves: tuple[float, float] | None,
    keep: Callable[..., tuple[Tensor, ...]],
    results: int,
    gradients: int,
    *inputs: Tensor,
) -> Any:
    """The results of a kernel; see `_Kernel`."""
    return _Kernel.apply(counter, moves, keep, results, gradients, *inputs)  # type: ignore[no-untyped-call]


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _keep_input(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return inputs[0], _per_row(inputs[0])


def _keep_sum(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return outs[1], _per_row(outs[1])


def _keep_inputs(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(inputs)


def _keep_nothing(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ()


class KernelStandIns(Liger):
    """Stands in for Liger's kernels, and for those that quantise a gate."""

    def __init__(self, counter: WorkCounter, *, quantise: bool) -> None:
        self._counter = counter
        self._quantise = quantise

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float | None) -> Any:
        return _norm(self._counter, x)

    def add_rms_norm(self, x: Tensor, change: Tensor, weight_D: Tensor, eps: float) -> Any:
        # Both terms have one gradient.
        return _kernel(self._counter, None, _keep_sum, 2, 1, x, change)

    def silu_product(self, gate: Tensor, up: Tensor) -> Any:
        moves = (0.0, 0.0) if self._quantise else None
        return _kernel(self._counter, moves, _keep_inputs, 1, 2, gate, up)

    def rotate(self, q_BHTE: Tensor, k_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Any:
        return _kernel(self._counter, None, _keep_nothing, 2, 2, q_BHTE, k_BHTE)


def _norm(counter: WorkCounter, x: Tensor, moves: tuple[float, float] | None = None) -> Any:
    return _kernel(counter, moves, _keep_input, 1, 1, x)


def norm_by_backend(counter: WorkCounter, stream: Tensor | StreamTerms) -> Any:
    """Stand in for a norm whose backend quantises its result; torch makes the sum and its
    gradient."""
    h = summed(stream)
    return _norm(counter, h, (0.0, _bytes([h, h, h]))), h


def norm_in_kernels(counter: WorkCounter, stream: Tensor | StreamTerms) -> Any:
    """Stand in for a norm that quantises its result: the sum and its gradient are in its
    kernels.
    """
    if isinstance(stream, StreamTerms):
        x = stream.x
    else:
        x = stream
    backward = (NORM_BACKWARD + ADDED) * x.numel()
    if isinstance(stream, StreamTerms):
        moves = (float(SUM * x.numel()), backward)
        return _kernel(counter, moves, _keep_sum, 2, 1, *stream)
    return _kernel(counter, (0.0, backward), _keep_input, 2, 1, x, torch.empty_like(x))


class FunctionStandIns(TorchFunctionMode):
    """Functions of torch that GPUs run as one kernel."""

    def __init__(self, counter: WorkCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is F.rms_norm:
            return _norm(self._counter, args[0])
        if func is not F.scaled_dot_product_attention:
            return func(*args, **keywords)
        q, k, v = args[:3]
        batch, heads, time, width = q.shape
        products = 2 if keywords.get("is_causal") else 4
        self._counter.work.attention += products * batch * heads * time**2 * width
        return _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]
