"""The GEMMs of a group of weights, each for its own rows of x: those of a linear layer, one weight
after the other.

    y [M, N]: rows of weight e are q(x_e) · q(w_e)ᵀ      dx likewise      dw [E, N, K]: dw_e = q(dy_eᵀ) · q(x_eᵀ)ᵀ

Each weight is multiplied as a layer of its own, so its amaxes, blocks and random bits are those of
one. Rows are padded to whole blocks where they are quantised, weight by weight. A weight without
rows is not prepared and not multiplied; under delayed scaling its call enters an amax of 0, so that
all ranks have the same histories.

Products are made one by one, or in one call where the plan says so (`Gemm.grouped`); operands are
the same, and are prepared one by one. The emulation has no such call: torch's grouped product of a
CPU writes the operands' dtype only, and it needs float32, to apply the global scales before it
rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import ExpertKernels
from fp4train.backends.grouped import Products
from fp4train.nn.call import (
    Biases,
    CallSource,
    Counts,
    Executor,
    GradientSum,
    GroupCallSource,
    LayerCall,
    Weights,
    gradient_dtypes,
)
from fp4train.nn.executors.gemms import (
    SAVED,
    flatten,
    sum_so_far,
    unflatten,
    without_torchs_autocast,
)
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.layer_shard import LayerShard
from fp4train.precision.context import State
from fp4train.precision.layer_plan import LayerPlan


class GroupGemms(Executor):
    """Runs the executor of one weight for each weight of a group.

    Args:
        member: the class of that executor.
        plan, device, shard, sums: see `Executor`.
    """

    def __init__(
        self,
        member: type[Executor],
        plan: LayerPlan,
        device: str,
        shard: LayerShard | None = None,
        *,
        sums: GradientSum,
    ) -> None:
        super().__init__(plan, device, shard, sums=sums)
        # without `shard`: a rank has each of its weights whole
        self.member = member(plan, device, sums=sums)
        self.states = self.member.states

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        rows = (
            f"{plan.layer.name}: the host reads how many rows each of its {plan.layer.experts} "
            "experts has"
        )
        return super().why_no_graph(plan) or rows

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        return self.member.quantised_columns(x_MK, w_NK)

    def __call__(
        self,
        source: CallSource,
        x_MK: Tensor,
        weights: Weights,
        biases: Biases,
        now: State,
        counts: Counts = (),
    ) -> Tensor:
        calls = self.member.calls_of_group(cast(GroupCallSource, source), x_MK, now, counts)
        x_MK = x_MK.to(self.dtype)
        y_MN: Tensor = GroupFunction.apply(x_MK, weights[0], biases[0], calls, counts)  # type: ignore[no-untyped-call]
        return y_MN


class BackendExperts(BackendLayer):
    """Experts whose GEMMs a backend runs together."""

    why_no_graph = GroupGemms.why_no_graph

    def __call__(
        self,
        source: CallSource,
        x_MK: Tensor,
        weights: Weights,
        biases: Biases,
        now: State,
        counts: Counts = (),
    ) -> Tensor:
        kernels = cast(ExpertKernels, source.states[self.states[0]])
        w_ENK, into = self._summed(weights[0])
        return kernels(x_MK, w_ENK, biases[0], self.table, counts, into=into)


class GroupFunction(torch.autograd.Function):
    """y [M, N] of (x [M, K], w [E, N, K], bias [E, N] or None, the call of each weight, its
    rows).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_ENK: Tensor,
        bias_EN: Tensor | None,
        calls: list[LayerCall],
        counts: Counts,
    ) -> Tensor:
        gradients = gradient_dtypes(x_MK, w_ENK, bias_EN, ctx.needs_input_grad)
        y_MN = x_MK.new_empty(x_MK.shape[0], w_ENK.shape[1])
        y_MN[sum(counts) :] = 0
        tensors: list[Tensor | None] = [None if gradients.x is None else w_ENK]
        ctx.heads = []
        executor, products = _grouped_products(calls[0].executor, "fprop")
        for call, rows in _used(calls, counts):
            call.gradients = gradients
            bias_N = None if bias_EN is None else bias_EN[call.member]
            part, saved = executor.forward(x_MK[rows], w_ENK[call.member], bias_N, call)
            if products is None:
                y_MN[rows] = part
            flat, heads = flatten(saved)
            tensors += flat
            ctx.heads.append(heads)
        _put_all(y_MN, products, calls, counts)
        ctx.save_for_backward(*tensors)
        ctx.calls = calls
        ctx.counts = counts
        ctx.gradients = gradients
        ctx.shapes = (x_MK.shape, w_ENK.shape)
        ctx.w = w_ENK if calls[0].executor.adds else None
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        w_ENK, *tensors = ctx.saved_tensors
        gradients, (x_shape, w_shape) = ctx.gradients, ctx.shapes
        if gradients.x is None:
            dx = None
        else:
            dx = dy_MN.new_empty(x_shape, dtype=gradients.x)
        if gradients.w is None or ctx.w is None:
            total = None
        else:
            total = sum_so_far(ctx.w, ctx.next_functions[1][0])
        if gradients.w is None or total is not None:
            dw = None
        else:
            dw = dy_MN.new_empty(w_shape, dtype=gradients.w)
        if gradients.bias is None:
            dbias = None
        else:
            dbias = dy_MN.new_empty(w_shape[:2], dtype=gradients.bias)
        idle = [number for number, count in enumerate(ctx.counts) if not count]
        if dx is not None:
            dx[sum(ctx.counts) :] = 0
        for gradient in (dw, dbias):
            if gradient is not None:
                gradient[idle] = 0
        executor, products = _grouped_products(ctx.calls[0].executor, "dgrad")
        with without_torchs_autocast(dy_MN.device.type):
            for heads, (call, rows) in zip(ctx.heads, _used(ctx.calls, ctx.counts), strict=True):
                saved = unflatten(tensors, heads)
                del tensors[: SAVED * len(heads)]
                w_NK = None if w_ENK is None else w_ENK[call.member]
                if total is None:
                    more = {}
                else:
                    more = {"total_NK": total[call.member]}
                dx_part, dw_NK, dbias_N = executor.backward(dy_MN[rows], w_NK, saved, call, **more)
                _put(dx, rows, dx_part if products is None else None)
                _put(dw, call.member, dw_NK)
                _put(dbias, call.member, dbias_N)
            _put_all(dx, products, ctx.calls, ctx.counts)
        return dx, dw, dbias, None, None


def _put(target: Tensor | None, at: slice | int, part: Tensor | None) -> None:
    """Set a part of a gradient that is wanted."""
    if target is not None and part is not None:
        target[at] = part


def _grouped_products(executor: Any, gemm: str) -> tuple[Any, Products | None]:
    """(The executor of one weight for this GEMM, what its products are put into to be made in one
    call; None: each is made by itself).
    """
    if executor.device == "meta" or not getattr(executor.plan, gemm).grouped:
        return executor, None
    products = Products(getattr(executor, gemm))
    copied = copy.copy(executor)
    setattr(copied, gemm, products)
    return copied, products


def _put_all(
    target: Tensor | None, products: Products | None, calls: list[LayerCall], counts: Counts
) -> None:
    """Make the products, and set their rows."""
    if target is not None and products is not None:
        for (_, rows), part in zip(_used(calls, counts), products.made(), strict=True):
            target[rows] = part


def _used(calls: list[LayerCall], counts: Counts) -> Iterator[tuple[LayerCall, slice]]:
    """The calls that are made, each with its rows of x."""
    start = 0
    for call, count in zip(calls, counts, strict=True):
        if count or call.executor.states:
            yield call, slice(start, start + count)
        start += count
