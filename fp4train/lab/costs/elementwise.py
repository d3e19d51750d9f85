"""Operations between the products of a block: the bytes that torch's operators move, counted as they are called, and
stand-ins for kernels of several operations, which move what is stated of them.

    RMSNorm          x and a float32 factor per row, as torch's fused kernel on a GPU
    Liger's kernels  what they keep; they move the bytes that `models/common/liger.py` states
    producers        norms and gates that are quantised where they are made (`nn/produced.py`): what their kernels keep.
                     Those that quantise are charged with the operands (`estimate.py`), here only the sum that a norm is
                     of, and a norm's kernel of backward.

The arithmetic of operators is counted where they are products (a scan's) or Fourier transforms of n real values
(2.5·n·log₂n), which are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp4train.models.common.liger import MOVED, Liger
from fp4train.nn.produced import LeftSum, Producer, unwritten_sum
from fp4train.precision.context import state
from fp4train.quantize.produced import ADDED, NORM_BACKWARD, SUM


class MadeFrom(NamedTuple):
    """The kind of `SourceTensors` that x or dy of a layer is computed from where it is quantised, and the number of
    layers that take what the kernels make."""

    kind: str
    layers: int


Made = Mapping[tuple[str, str], MadeFrom]
"""(Layer, "x" or "dy") that norms, gates and their gradients quantise."""
NOTHING_MADE: Made = MappingProxyType({})


def made_by(producers: Iterable[Producer]) -> Made:
    """Operands that these producers quantise."""
    return {
        (layer.layer.name, tensor): MadeFrom(kind, len(layers))
        for each in producers
        for tensor, layers, kind in (("x", each.readers, each.kind), ("dy", each.writers, "gradients"))
        for layer in layers
    }


class BlockTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that operations read and write; views and allocations move none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.fused = self.flops = 0.0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in str(func):
            return out
        self.operations += 1
        read = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.bytes += sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in (*read, *written))
        self.flops += _flops(func.overloadpacket, args, out)
        return out


_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1}
"""Operation → the place of its first factor, whose last dimension is summed over."""


def _flops(operation: Any, args: Any, out: Any) -> float:
    """Operations of a product, or of a Fourier transform between real and complex values; 0 for others."""
    if (place := _PRODUCTS.get(operation)) is not None:
        return float(2 * out.numel() * args[place].shape[-1])
    if operation in (_ATEN._fft_r2c, _ATEN._fft_c2r):
        real = args[0] if operation is _ATEN._fft_r2c else out
        return float(2.5 * real.numel() * math.log2(max(2, math.prod(real.shape[axis] for axis in args[1]))))
    return 0.0


class _Fused(torch.autograd.Function):
    """A kernel each way of several operations, whose results are alike to the first of its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        traffic: BlockTraffic,
        moves: tuple[float, float],
        of: int,
        keep: Callable[..., Any],
        made: int,
        *inputs: Tensor | None,
    ) -> Any:
        given = [each for each in inputs if each is not None]
        results = [torch.empty_like(each) for each in given[:made]]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*keep(given, results))
        moved = sum(each.numel() * each.itemsize for each in given[:of]) / 2
        ctx.traffic, ctx.moved, ctx.like = traffic, moves[1] * moved, inputs
        traffic.fused += moves[0] * moved
        traffic.operations += 1
        return results[0] if made == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.traffic.fused += ctx.moved
        ctx.traffic.operations += 1
        return None, None, None, None, None, *(None if each is None else torch.empty_like(each) for each in ctx.like)


class KernelStandIns(Liger):
    """Stands in for `Liger`, and for torch's norm."""

    def __init__(self, traffic: BlockTraffic) -> None:
        self._traffic = traffic

    def run(
        self, moves: tuple[float, float], keep: Callable[..., Any], made: int, *inputs: Tensor | None, of: int = 1
    ) -> Any:
        """The `made` results of a kernel each way that moves so many bytes per BF16 element of the first `of` inputs,
        and keeps what `keep` says of inputs and results."""
        return _Fused.apply(self._traffic, moves, of, keep, made, *inputs)  # type: ignore[no-untyped-call]

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float | None = None) -> Any:
        return self.run(MOVED["rms_norm"], _norm_keeps, 1, x, weight)

    def add_rms_norm(self, x: Tensor, change: Tensor, weight: Tensor, eps: float) -> Any:
        return self.run(MOVED["add_rms_norm"], _stream_keeps, 2, x, change, weight)

    def silu_product(self, gate: Tensor, up: Tensor) -> Any:
        return self.run(MOVED["silu_product"], lambda given, made: given, 1, gate, up)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return self.run(MOVED["rotate"], lambda given, made: (), 2, q, k, of=2)


class ProducerStandIn:
    """Stands in for a producer that runs."""

    def __init__(self, kernels: KernelStandIns, producer: Producer) -> None:
        self._kernels, self._gate, self._by_backend = kernels, producer.kind == "gate", producer.by_backend

    def __call__(self, *inputs: Any) -> Any:
        """The results of a norm's (x, weight, ε, change and sum of `leave`, or None), or of a gate's (gate, up)."""
        if self._gate:
            return self._kernels.run((0.0, 0.0), lambda given, made: given, 1, *inputs)
        x, weight, _, change, left = inputs
        if self._by_backend:
            h = x if change is None else x + change
            return self._kernels.run((0.0, MOVED["rms_norm"][1]), _norm_keeps, 1, h, weight), h
        backward = NORM_BACKWARD + ADDED
        if change is None:
            summed = 0.0 if left is None else SUM
            return self._kernels.run((summed, backward), _norm_keeps, 2, x, torch.empty_like(x), weight)
        return self._kernels.run((SUM, backward), _stream_keeps, 2, x, change, weight)

    def leave(self, x: Tensor, change: Tensor) -> Any:
        """The sum of the terms, in the place of `NormProducer.leave`."""
        return LeftSum(cast(Any, self), unwritten_sum(x, change), x, change, ([], state()))


def _norm_keeps(given: list[Tensor], made: list[Tensor]) -> tuple[Tensor, ...]:
    return given[0], _per_row(given[0])


def _stream_keeps(given: list[Tensor], made: list[Tensor]) -> tuple[Tensor, ...]:
    return made[1], _per_row(made[1])


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
