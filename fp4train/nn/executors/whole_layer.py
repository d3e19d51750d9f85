"""Executors that leave a layer's three GEMMs together to others: to torch in high precision, to a backend's kernels.

torch's own backward saves the rounded weight: a copy per call, of every microbatch in flight. Where the weight is
gathered for the time of a call that would keep a whole model on every rank. It also rounds dw to the dtype of the
product where dw is one term of a sum. `TorchFunction` reads the weight again, and may leave dw in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import BACKENDS, LayerKernels, widened
from fp4train.nn.call import Call, Executor, Route
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.weights import Gathered, WeightForm, values_of
from fp4train.precision.context import State
from fp4train.precision.plan import LayerPlan
from fp4train.quantize import Decoded

if TYPE_CHECKING:
    from fp4train.nn.executors.cut import LayerShard
    from fp4train.nn.linear import Linear


def torch_linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's own linear layer in `dtype`, with its C++ backward: no overhead over plain BF16."""
    return widened(F.linear, x_MK.to(dtype), w_NK.to(dtype), None if bias_N is None else bias_N.to(dtype))


class TorchLayer(Executor):
    """A layer without quantised GEMMs, or on the meta device.

    Where dw is a part of a sum it is a float32 product, and the weight is rounded once per step.
    """

    def __init__(self, plan: LayerPlan, device: str, shard: LayerShard | None = None, *, sums: bool = False) -> None:
        super().__init__(plan, device, shard, sums=sums and plan.table.torch_dtype != torch.float32)
        self.w_row = WeightForm(None, BACKENDS["torch"], self.dtype, device, column=False)
        self.route = Route("torch", self.dtype)

    def __call__(
        self, layer: Linear, x_MK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], now: State
    ) -> Tensor:
        (w_NK,), (bias_N,) = weights, biases
        if not self.sums and not isinstance(w_NK, Gathered):
            return torch_linear(x_MK, w_NK, bias_N, self.dtype)
        bias_N = None if bias_N is None else bias_N.to(self.dtype)
        assert now.context is not None
        keeps = self.sums and layer.keeps_forms
        call = layer.new_call(now.context, self, 0, training=False) if keeps else None
        y_MN: Tensor = TorchFunction.apply(x_MK.to(self.dtype), w_NK, bias_N, self.sums, call)  # type: ignore[no-untyped-call]
        return y_MN


class TorchFunction(torch.autograd.Function):
    """y [M, N] of (x [M, K], w [N, K], bias [N] or None, sums, call), in the dtype of x.

    As torch's linear layer computes it, in every bit, but that dw is a float32 product with `sums`. `call`: of the
    layer, whose prepared weights hold the rounded one for all calls of a step; None: each call rounds it.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, sums: bool, call: Call | None = None
    ) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.sums, ctx.call = sums, call
        return widened(F.linear, x_MK, _rounded(w_NK, x_MK.dtype, call), bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, w_NK = ctx.saved_tensors
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = widened(torch.mm, dy_MN, _rounded(w_NK, dy_MN.dtype, ctx.call))
        if ctx.needs_input_grad[1] and ctx.sums:
            dw = BACKENDS["torch"].product(Decoded(dy_MN.T, None), Decoded(x_MK.T, None), out_dtype=torch.float32)
        elif ctx.needs_input_grad[1]:
            dw = widened(torch.mm, dy_MN.T, x_MK).to(w_NK.dtype)
        if ctx.needs_input_grad[2]:
            dbias = widened(torch.sum, dy_MN, dim=0)
        return dx, dw, dbias, None, None


def _rounded(w_NK: Tensor, dtype: torch.dtype, call: Call | None) -> Tensor:
    if call is None or w_NK.dtype == dtype:
        return values_of(w_NK, dtype)
    rounded = call.weights.form(w_NK, call.executor.w_row, call)
    assert isinstance(rounded, Decoded)
    return rounded.values


class BackendLayer(Executor):
    """A layer whose GEMMs a backend runs together (Transformer Engine)."""

    why_no_graph = staticmethod(Gemms.why_no_graph)

    def __init__(self, plan: LayerPlan, device: str, shard: LayerShard | None = None, *, sums: bool = False) -> None:
        super().__init__(plan, device, shard, sums=sums)
        assert plan.layer_backend is not None
        self.table, self.states = plan.table, (plan.layer_backend,)

    def __call__(
        self, layer: Linear, x_MK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], now: State
    ) -> Tensor:
        (w_NK,), (bias_N,), context = weights, biases, now.context
        kernels = cast(LayerKernels, layer.states[self.states[0]])
        w_NK = w_NK.copied() if isinstance(w_NK, Gathered) else w_NK.contiguous()
        position = None
        if context is not None and context.step is not None and layer.keeps_forms:
            position = (context.seed, context.step)
        return kernels(x_MK, w_NK, bias_N, self.table, position=position)
