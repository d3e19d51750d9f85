"""The three GEMMs of a linear layer, each on its own backend, and the autograd function of a
layer with one weight. (Experts, fused norms and gated MLPs have functions of their own.)

With q(·) the quantisation of an operand by the layer's table (the identity for high precision),

    fprop   y  [M, N] = q(x) [M, K] · q(w) [N, K]ᵀ + bias
    dgrad   dx [M, K] = q(dy) [M, N] · q(wᵀ) [K, N]ᵀ
    wgrad   dw [N, K] = q(dyᵀ) [N, M] · q(xᵀ) [K, M]ᵀ

Row-wise and column-wise forms are each quantised from the high-precision tensor: the transpose of a
quantised tensor differs from the quantised transpose, except for square blocks. The layer's plan
selects everything; there are no flags. For backward, q(xᵀ) is saved as packed codes and scales (4.5
bits per element for NVFP4) instead of x.

A table may have dgrad and wgrad take the values v(·) of the codes that fprop multiplied, in high
precision. Then the codes of fprop are what is saved of x, and made again of w:

    dgrad   dx [M, K] = dy [M, N] · v(q(w))         wgrad   dw [N, K] = dyᵀ [N, M] · v(q(x))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import BACKENDS, Prepared
from fp4train.nn.call import (
    Biases,
    CallSource,
    CompiledRoute,
    Counts,
    Executor,
    GradientSum,
    LayerCall,
    Weights,
    gradient_dtypes,
)
from fp4train.nn.held_amaxes import HeldAmaxes
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.operands import TensorForms
from fp4train.nn.ranks import local
from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weight_form import WeightForm
from fp4train.precision.context import State
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Decoded, Hadamard, High, Quantized, ValuesOf, quantizer
from fp4train.shards import is_sharded

SavedInput = tuple[Quantized | Tensor | None, ...]
"""Tensors of x that backward needs, one per set of GEMMs: q(xᵀ), q(x), x in high precision, or
None.
"""
SAVED = len(Quantized._fields) - 2
"""Tensors of a `Quantized`."""
_NO_CODES = (None,) * (SAVED - 1)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dx [M, K], dw [N, K], dbias [N]; None for those not wanted."""
Prepare = Callable[[Tensor, LayerCall, bool, bool], tuple[Prepared | None, Prepared | None]]
SavedKinds = list[tuple[Any, ...] | None]
"""The rest of each quantised x, without its tensors; None: x is a tensor, or is not saved."""


def flatten(saved: SavedInput) -> tuple[list[Tensor | None], SavedKinds]:
    """(`SAVED` tensors for each x, what is none): autograd saves tensors alone."""
    tensors: list[Tensor | None] = []
    heads: SavedKinds = []
    for x in saved:
        tensors += x[2:] if isinstance(x, Quantized) else (x, *_NO_CODES)
        heads.append(x[:2] if isinstance(x, Quantized) else None)
    return tensors, heads


def unflatten(tensors: Sequence[Any], heads: SavedKinds) -> SavedInput:
    """The argument of `flatten`."""
    saved: list[Any] = []
    # no generator, whose every step is one more call of Python's
    for number, head in enumerate(heads):
        x = tensors[SAVED * number : SAVED * (number + 1)]
        saved.append(x[0] if head is None else Quantized(*head, *x))
    return tuple(saved)


ADDING: Final = frozenset({"cuda"})
"""Types of devices on which a backend that `adds` makes one product of a product and a sum."""
_has_autocast = cache(torch.amp.is_autocast_available)
"""Kept for each device type: the answer never changes, since torch raises of a name that is not
registered yet.
"""


def torch_autocasts(device: str) -> bool:
    """Whether torch.autocast is on for this device type; "meta" has no autocast."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def without_torchs_autocast(device: str) -> AbstractContextManager[object]:
    """Disable torch.autocast: the GEMMs choose their own dtypes, and it must not cast their
    operands again.
    """
    if torch_autocasts(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def adds(dtype: torch.dtype, device: str, sums: GradientSum) -> bool:
    """Whether a wgrad that can adds dw to the sum so far, on devices of this type."""
    return sums == "product" and device in ADDING and dtype is not torch.float32


def accumulates(node: Any) -> bool | None:
    """Whether this backward pass adds to the gradients of all leaves below a node of the graph, of
    which `inputs` may leave some out; None: `torch.autograd.grad` returns one instead.
    """
    if below := {
        accumulates(next_node) for next_node, _ in node.next_functions if next_node is not None
    }:
        return None if None in below else all(below)
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that torch.autograd.grad is asked for
        return None


def sum_so_far(w_NK: Tensor, node: Any) -> Tensor | None:
    """The sum of a weight's gradients, float32, to which a product of this pass can be added; None:
    autograd has dw.

    It has the first one, those of weights that are no parameters, those that a hook on the
    parameter is to see, and all in passes that leave `.grad` as it is (`accumulates`).

    Args:
        w_NK: the weight that the layer was called with; of tensor-parallel ranks the parameter:
            what autograd saved is another tensor where it is recomputed.
        node: node of the graph, to which autograd would give dw.
    """
    if (
        not w_NK.is_leaf
        or w_NK.dtype != torch.float32
        or w_NK._backward_hooks
        or w_NK._post_accumulate_grad_hooks
    ):
        return None
    if w_NK.grad is not None and accumulates(node):
        return local(w_NK.grad)
    return None


def tensor_of(prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """The tensor that an operand stands for, in `dtype`."""
    if isinstance(prepared, Quantized):
        prepared = quantizer(prepared.spec, prepared.codes.device.type).decode(prepared)
    return prepared.tensor(dtype)


def summed_parameter(call: LayerCall, w_NK: Tensor) -> Tensor:
    """The argument w of `sum_so_far` for a weight that a call multiplies."""
    if call.parameter is not None and is_sharded(call.parameter):
        return call.parameter
    return w_NK


class Gemms(Executor):
    """The GEMMs of one layer, ready to run: its plan with backends and quantizers looked up.

    Args:
        plan, device, shard, sums: see `Executor`.

    Attributes:
        y_dtype: dtype of y.
    """

    kinds = (DelayedScaling, HeldAmaxes)

    def __init__(
        self,
        plan: LayerPlan,
        device: str,
        shard: LayerShard | None = None,
        *,
        sums: GradientSum = None,
    ) -> None:
        super().__init__(plan, device, shard, sums=sums)
        dtype = self.dtype
        self.fprop, self.dgrad, self.wgrad = (
            BACKENDS[gemm.backend].summing(gemm.operands.accumulator) for gemm in plan.gemms
        )
        fprop, dgrad, wgrad = (gemm.operands for gemm in plan.gemms)
        self.y_dtype = dtype
        if sums and self.wgrad.writes_float32(wgrad.first):
            self.dw_dtype = torch.float32
        else:
            self.dw_dtype = dtype
        self.keeps_x = isinstance(plan.sources["wgrad", "x"].source, High)
        """Whether wgrad takes x in high precision; backward then needs x itself."""
        self.adds = self.wgrad.adds and adds(dtype, device, sums)
        codes = (self.fprop.takes_codes, True)
        tiles = (self.fprop.takes_tiles, self.wgrad.takes_tiles)
        operands = plan.sources
        forms_of_x = operands["fprop", "x"], operands["wgrad", "x"]
        self.x = TensorForms(forms_of_x, codes, device, shard, tiles=tiles)
        codes, tiles = zip(
            *((backend.takes_codes, backend.takes_tiles) for backend in (self.dgrad, self.wgrad)),
            strict=True,
        )
        forms_of_dy = operands["dgrad", "dy"], operands["wgrad", "dy"]
        self.dy = TensorForms(forms_of_dy, codes, device, shard, tiles=tiles)
        self.w_row = WeightForm(
            operands["fprop", "w"], self.fprop, dtype, device, shard=shard, fused=plan.fused
        )
        self.dequantises_w = isinstance(operands["dgrad", "w"].source, ValuesOf)
        """Whether dgrad takes the values of the codes that fprop multiplies."""
        if self.dequantises_w:
            self.w_column = self.w_row
        else:
            self.w_column = WeightForm(
                operands["dgrad", "w"], self.dgrad, dtype, device, shard=shard, fused=plan.fused
            )
            self.w_row.pair_with(self.w_column)
        specs = [spec for pair in (fprop, dgrad, wgrad) for spec in pair.both if spec is not None]
        self.states = ()
        if any(spec.delayed is not None for spec in specs):
            self.states = (DelayedScaling.kind,)
        elif any(spec.held is not None for spec in specs):
            self.states = (HeldAmaxes.kind,)
        self.route = CompiledRoute("operator", dtype, self.keeps_x)

    def begin_at(self, feature: int) -> None:
        """Key random bits of x and w as those of a wider layer's in features from `feature` on."""
        self.x.row.feature = self.x.column.feature = feature
        if self.w_column.transposed:
            self.w_column.start = (0, feature)
        else:
            self.w_column.start = (feature, 0)
        self.w_row.start = (0, feature)

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        for where, spec in cls.quantised(plan):
            if spec.held is not None:
                return (
                    f"{where}: the host counts the steps for which held={spec.held} holds its amax"
                )
            if isinstance(spec.hadamard, Hadamard) and spec.hadamard.signs == "step":
                return f"{where}: hadamard.signs='step' draws other signs on the host in every step"
            if spec.hadamard is not None and not isinstance(spec.hadamard, Hadamard):
                return (
                    f"{where}: the matrix of {spec.hadamard} is copied from the host in every call"
                )
        return None

    def __call__(
        self,
        source: CallSource,
        x_MK: Tensor,
        weights: Weights,
        biases: Biases,
        now: State,
        counts: Counts = (),
    ) -> Tensor:
        call = source.call_in(now, self, x_MK.shape[0])
        if torch._C._are_functorch_transforms_active():
            apply: Any = LayerFunction.apply
        else:
            apply = _apply
        y_MN: Tensor = apply(x_MK, weights[0], biases[0], call)
        return y_MN

    def forward(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: LayerCall,
        prepare: Prepare | None = None,
    ) -> tuple[Tensor, SavedInput]:
        """(y [M, N] in `y_dtype`, what backward needs of x).

        Consecutive layers that read the same tensor (queries, keys and values; gate and up) share
        its prepared forms, so one copy is saved for backward. The cache keeps a reference to the
        tensor, so that its memory is not reused meanwhile.

        Args:
            prepare: function that makes both forms of x; None: `TensorForms.prepare`.
        """
        # Tensor.to takes a microsecond where nothing is to be done.
        if x_MK.dtype is not self.dtype:
            x_MK = x_MK.to(self.dtype)
        gradients = call.gradients
        keeps_codes = gradients.w is not None and not self.keeps_x
        forms: Any = None
        if self.x.pure and not x_MK.is_inference():
            shared = call.shared
        else:
            shared = None
        if shared is not None:
            wants = self.x.wants[keeps_codes]
            seen = shared.get("input")
            if (
                seen is not None
                and seen[0] == wants
                and seen[1] == x_MK._version
                and seen[2].is_set_to(x_MK)
            ):
                forms = seen[3]
        if forms is None:
            forms = (prepare or self.x.prepare)(x_MK, call, True, keeps_codes)
            if shared is not None:
                shared["input"] = (wants, x_MK._version, x_MK, forms)
        b = call.weights.prepared(w_NK, self.w_row, call)
        y_MN = self.fprop.product(forms[0], b, out_dtype=self.y_dtype, bias=bias_N)
        return y_MN, (x_MK if gradients.w is not None and self.keeps_x else forms[1],)

    def backward(
        self,
        dy_MN: Tensor,
        w_NK: Tensor | None,
        saved: SavedInput,
        call: LayerCall,
        prepare: Prepare | None = None,
        total_NK: Tensor | None = None,
    ) -> Gradients:
        """The gradients that `call` wants.

        Args:
            saved: the second result of `forward`.
            prepare: function that makes both forms of dy; None: `TensorForms.prepare`.
            total_NK: sum to which dw is added, float32, if the executor `adds`; it is not returned
                then.
        """
        if dy_MN.dtype is self.dtype:
            dy = dy_MN
        else:
            dy = dy_MN.to(self.dtype)
        gradients = call.gradients
        dx_MK = dw_NK = dbias_N = None
        row, column = (prepare or self.dy.prepare)(
            dy, call, gradients.x is not None, gradients.w is not None
        )
        if row is not None:
            assert w_NK is not None and gradients.x is not None
            w = call.weights.prepared(w_NK, self.w_column, call)
            if self.dequantises_w:
                w = Decoded(tensor_of(w, self.dtype).T, None)
            dx_MK = self.dgrad.product(row, w, out_dtype=self.dtype)
            if gradients.x is not self.dtype:
                dx_MK = dx_MK.to(gradients.x)
        if column is not None:
            (x,) = saved
            assert x is not None and gradients.w is not None
            if self.x.row_serves_both and isinstance(x, Quantized):
                x = tensor_of(x, self.dtype)
            b: Prepared = Decoded(x.T, None) if isinstance(x, Tensor) else x
            if total_NK is not None:
                self.wgrad.add(total_NK, column, b)
            else:
                dw_NK = self.wgrad.product(column, b, out_dtype=self.dw_dtype).to(gradients.w)
        if gradients.bias is not None:
            dbias_N = dy.sum(0, dtype=torch.float32).to(gradients.bias)
        return dx_MK, dw_NK, dbias_N


class LayerFunction(torch.autograd.Function):
    """y of (x_MK, w_NK, bias_N, call) of a layer with one weight, by the executor of the call.

    Tensors are saved through autograd, so its hooks and checks apply.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, call: LayerCall
    ) -> Tensor:
        call.gradients = gradient_dtypes(x_MK, w_NK, bias_N, ctx.needs_input_grad)
        y_MN: Tensor
        y_MN, saved = call.executor.forward(x_MK, w_NK, bias_N, call)
        tensors, ctx.heads = flatten(saved)
        ctx.save_for_backward(None if call.gradients.x is None else w_NK, *tensors)
        ctx.call = call
        if call.executor.adds:
            ctx.w = summed_parameter(call, w_NK)
        return y_MN

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        # of a pass whose graph is kept only: the refusal itself takes some microseconds
        if torch.is_grad_enabled():
            return _once(ctx, dy_MN)
        call: LayerCall = ctx.call
        w_NK, *tensors = ctx.saved_tensors
        saved = unflatten(tensors, ctx.heads)
        adds = call.executor.adds and ctx.needs_input_grad[1]
        if adds:
            more = {"total_NK": sum_so_far(ctx.w, ctx.next_functions[1][0])}
        else:
            more = {}
        if not torch_autocasts(dy_MN.device.type):
            return (*call.executor.backward(dy_MN, w_NK, saved, call, **more), None)
        with without_torchs_autocast(dy_MN.device.type):
            return (*call.executor.backward(dy_MN, w_NK, saved, call, **more), None)


_apply: Callable[..., Tensor] = super(torch.autograd.Function, LayerFunction).apply
"""`LayerFunction.apply` without what torch does for transforms of functions (torch.func): 3 µs of
the host.
"""
_once = once_differentiable(LayerFunction.backward)
"""The backward pass, without gradients enabled, whose results refuse a second derivative."""
