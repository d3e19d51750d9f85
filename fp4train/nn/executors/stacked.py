"""Layers that read one x as one layer of a backend: their weights are rows of one matrix, without a copy.

The parameters stay those of the layers, with their names, shapes and gradients. Only their memory moves, once, and
again where something else replaced it (`module.to`): a checkpoint, an optimizer or a norm reads them as before. The
gradients that a product adds to lie in one piece of memory likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.nn.call import Recorded, Sums
from fp4train.nn.executors.gemms import accumulates
from fp4train.nn.executors.joint import Joint
from fp4train.nn.executors.whole_layer import BackendLayer, zeros_held
from fp4train.precision.context import State
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize.quantizer import PLAIN

if TYPE_CHECKING:
    from fp4train.nn.executors.cut import LayerShard
    from fp4train.nn.linear import Linear


class JointBackend(Joint):
    """Layers whose GEMMs a backend runs together."""

    alone: BackendLayer

    def __init__(self, plan: LayerPlan, device: str, shard: LayerShard | None = None, *, sums: Sums = None) -> None:
        super().__init__(plan, device, shard, sums=sums)
        self.alone = BackendLayer(plan, device, shard, sums=sums)
        self.states = self.alone.states

    @classmethod
    def why_no_graph(cls, plan: LayerPlan, recorded: Recorded = "step") -> str | None:
        return BackendLayer.why_no_graph(plan, recorded)

    def products(self, x_MK: Tensor, layers: Sequence[Linear], now: State) -> Sequence[Tensor]:
        weights, biases, bias_N = [each.own_weights[0] for each in layers], [each.bias for each in layers], None
        alike = len({each.requires_grad for each in weights}) == 1
        if not alike or not stack_in_memory(weights):
            return [self.alone(each, x_MK, each.own_weights, (each.bias,), now) for each in layers]
        if any(bias is not None for bias in biases):
            each = zip(weights, biases, strict=True)
            bias_N = torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in each])
        for other in layers[1:]:
            self.alone.kernels(other).release()
        into, held = None, list[Tensor]()
        w_NK: Tensor = StackedFunction.apply(held, *weights)  # type: ignore[no-untyped-call]
        if self.sums and w_NK.dtype == torch.float32:
            zeros = partial(zeros_held, w_NK, held)
            into = partial(_sums, weights, zeros) if self.sums == "product" else zeros
        y_MN = self.alone.multiplied(layers[0], x_MK, w_NK, bias_N, now, into, 1, weights)
        ys: tuple[Tensor, ...] = SplitFunction.apply(y_MN, [len(w) for w in weights])  # type: ignore[no-untyped-call]
        return ys


def stack_in_memory(weights: Sequence[Tensor]) -> bool:
    """Whether the weights [Nᵢ, K] are rows of one matrix, [ΣNᵢ, K], to which parameters are moved if need be. Others
    are not: views of parameters, tensors without memory of their own, one parameter of two layers, and several dtypes
    or devices."""
    if rows_of_one(weights) is not None:
        return True
    first = weights[0]
    if len(set(map(id, weights))) < len(weights):
        return False
    for each in weights:
        if type(each) not in PLAIN or not isinstance(each, nn.Parameter) or each.shape[1:] != first.shape[1:]:
            return False
        if each.dtype != first.dtype or each.device != first.device:
            return False
    with torch.no_grad():
        matrix = torch.cat([each.detach() for each in weights])
        for each, rows in zip(weights, torch.split(matrix, [len(each) for each in weights]), strict=True):
            each.data = rows
    return True


def rows_of_one(matrices: Sequence[Tensor]) -> Tensor | None:
    """The matrix whose rows are those of all, in turn, in the same memory; None: there is none."""
    first, rows = matrices[0], sum(len(each) for each in matrices)
    if not all(type(each) in PLAIN and each.dtype == first.dtype for each in matrices):
        return None
    shape, start = (rows, first.shape[1]), first.storage_offset()
    if first.untyped_storage().nbytes() < (start + rows * shape[1]) * first.element_size():
        return None
    matrix = first.detach().as_strided(shape, (shape[1], 1), start)
    parts = torch.split(matrix, [len(each) for each in matrices])
    return matrix if all(part.is_set_to(each) for part, each in zip(parts, matrices, strict=True)) else None


def _sums(weights: Sequence[Tensor], zeros: Callable[[Any], Tensor], node: Any) -> Tensor:
    """The gradients that dw is added to, or zeros, which autograd takes on, in passes that leave some as they are."""
    return sums_in_memory(weights) if accumulates(node) else zeros(node)


def sums_in_memory(weights: Sequence[Tensor]) -> Tensor:
    """float32 [ΣNᵢ, K]: the gradients of the parameters, which are rows of it; zeros at first."""
    grads = [each.grad for each in weights if each.grad is not None]
    if len(grads) == len(weights) and (total := rows_of_one(grads)) is not None:
        return total
    rows = [len(each) for each in weights]
    total = torch.zeros(sum(rows), weights[0].shape[1], dtype=torch.float32, device=weights[0].device)
    for each, own in zip(weights, torch.split(total, rows), strict=True):
        if each.grad is not None:
            own.copy_(each.grad)
        each.grad = own
    return total


class StackedFunction(torch.autograd.Function):
    """[ΣNᵢ, K] of weights that lie so in memory; its gradient, if it has one or `summed` holds it then, is split."""

    @staticmethod
    def forward(ctx: Any, summed: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.summed = summed
        ctx.kinds = [(len(each), each.dtype) for each in weights]
        matrix = rows_of_one(weights)
        assert matrix is not None
        return matrix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw_NK: Tensor | None) -> tuple[Tensor | None, ...]:
        dw_NK = ctx.summed.pop() if ctx.summed else dw_NK
        if dw_NK is None:
            return None, *(None,) * len(ctx.kinds)
        parts = torch.split(dw_NK, [rows for rows, _ in ctx.kinds])
        return None, *(part.to(dtype) for part, (_, dtype) in zip(parts, ctx.kinds, strict=True))


class SplitFunction(torch.autograd.Function):
    """The columns [M, Nᵢ] of y [M, ΣNᵢ] of each layer, views of y.

    `given` on its node is (what the gradients of the parts are then, the gradient of y), where the latter is there
    already, in whichever form.
    """

    @staticmethod
    def forward(ctx: Any, y_MN: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.given, ctx.sizes, ctx.rows = None, sizes, y_MN.shape[0]
        return tuple(torch.split(y_MN.detach(), sizes, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, None]:
        if ctx.given is not None:
            carriers, dy_MN = ctx.given
            ctx.given = None
            if all(dy is not None and dy.is_set_to(each) for dy, each in zip(dys, carriers, strict=True)):
                return dy_MN, None
        some = next((dy for dy in dys if dy is not None), None)
        if some is None:
            return None, None
        each = zip(dys, ctx.sizes, strict=True)
        return torch.cat([some.new_zeros(ctx.rows, n) if dy is None else dy for dy, n in each], dim=1), None
