"""Executors that leave a layer's three GEMMs together to others: to torch in high precision, to a
backend's kernels.

torch's own backward saves the rounded weight: a copy per call, of every microbatch in flight. Where
the weight is gathered for the time of a call that would keep a whole model on every rank. It also
rounds dw to the dtype of the product where dw is one term of a sum. `TorchLayer` reads the weight
again then, and leaves dw in float32.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from fp4train.backends import (
    BACKENDS,
    LAYER_BACKENDS,
    KernelCall,
    LayerKernels,
    Prepared,
    Readers,
    add_product,
    widened,
)
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import (
    CompiledRoute,
    Executor,
    Gradients,
    ProductExecutor,
    Saved,
    accumulates,
    adds,
)
from fp4train.nn.gathered import Gathered, values_of
from fp4train.nn.weight_form import WeightForm
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Decoded, High, Operand


def torch_linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's own linear layer in `dtype`, with its C++ backward: no overhead over plain BF16."""
    return widened(
        F.linear, x_MK.to(dtype), w_NK.to(dtype), None if bias_N is None else bias_N.to(dtype)
    )


class TorchLayer(ProductExecutor):
    """A layer without quantised GEMMs, or on the meta device.

    Where dw is a part of a sum it is a float32 product, and the weight is prepared as others are.
    """

    counted = False

    def build(self) -> None:
        if self.dtype is torch.float32:
            self.sums = None
        self.adds = adds(self.dtype, self.device, self.sums)
        self.w_row = WeightForm(
            Operand("w", High("in")), BACKENDS["torch"], self.dtype, self.device
        )
        self.route = CompiledRoute("torch", self.dtype)

    def takes_call(self, w: Tensor) -> bool:
        return self.sums is not None or isinstance(w, Gathered)

    def __call__(
        self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: LayerCall | None
    ) -> Tensor:
        if call is None:
            return torch_linear(x_MK, w, bias, self.dtype)
        bias_N = None if bias is None else bias.to(self.dtype)
        return super().__call__(x_MK.to(self.dtype), w, bias_N, call)

    def forward(
        self,
        x_MK: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: LayerCall,
    ) -> tuple[Tensor, Saved]:
        """(y [M, N] in the dtype of x, the weight and x).

        As torch's linear layer computes it, in every bit.
        """
        bias_N = None if bias is None else bias.to(x_MK.dtype)
        y_MN = widened(F.linear, x_MK, self._rounded(w, call), bias_N)
        return y_MN, (None if call.gradients.x is None else w, x_MK)

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: LayerCall,
        total: Tensor | None = None,
    ) -> Gradients:
        """See `ProductExecutor.backward`; dw may be a float32 product."""
        w, x_MK = saved
        gradients = call.gradients
        dx = dw = dbias = None
        if gradients.x is not None:
            assert isinstance(w, Tensor)
            dx = widened(torch.mm, dy_MN, self._rounded(w, call))
        if gradients.w is not None:
            assert isinstance(x_MK, Tensor)
            if total is not None:
                add_product(total, dy_MN.T, x_MK)
            elif self.sums:
                factors = Decoded(dy_MN.T, None), Decoded(x_MK.T, None)
                dw = BACKENDS["torch"].product(*factors, out_dtype=torch.float32).to(gradients.w)
            else:
                dw = widened(torch.mm, dy_MN.T, x_MK).to(gradients.w)
        if gradients.bias is not None:
            dbias = widened(torch.sum, dy_MN, dim=0)
        return dx, dw, dbias

    def _rounded(self, w_NK: Tensor, call: LayerCall) -> Tensor:
        if isinstance(w_NK, Gathered) or w_NK.dtype == self.dtype:
            return values_of(w_NK, self.dtype)
        rounded = call.weights.prepared(w_NK, self.w_row, call)
        assert isinstance(rounded, Decoded)
        return rounded.values


class BackendLayer(Executor):
    """A layer whose GEMMs a backend runs together (Transformer Engine)."""

    counted = False

    def build(self) -> None:
        plan = self.plan
        assert plan.layer_backend is not None
        self.table = plan.table
        self.states = (plan.layer_backend,)
        self.backend = LAYER_BACKENDS[plan.layer_backend]

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        for where, spec in cls.quantised(plan):
            if spec.delayed is not None:
                return (
                    f"{where}: delayed scaling on backend={plan.layer_backend} updates its "
                    "histories on the host; with "
                    "backend=emulate or native they are fp4train's, which can be recorded"
                )
        return None

    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: LayerCall) -> Tensor:
        codes = self._codes(w, call)
        w_NK, into = self._summed(w, values=codes is None)
        shared = call.shared
        readers = max(1, len(self.plan.readers))
        of_x = None
        if shared is not None and (readers > 1 or self.backend.name in shared):
            of_x = Readers(shared, readers)
        kernels = cast(LayerKernels, call.states[self.backend.name])
        kept = call.weights.keep
        kernel_call = KernelCall(call.constant if kept else None, into, not kept, of_x, codes)
        return kernels(x_MK, w_NK, bias, self.table, kernel_call)

    @cached_property
    def w(self) -> tuple[WeightForm, WeightForm]:
        """The weight as codes that are made elsewhere: the form of fprop, and that of dgrad, which
        is the same where dgrad takes the values of fprop's codes.
        """

        def form(operand: Operand) -> WeightForm:
            return WeightForm(operand, BACKENDS["native"], self.dtype, self.device, strided=True)

        row, column = (self.plan.sources[gemm, "w"].prepared_operand for gemm in ("fprop", "dgrad"))
        form_of_row = form(row)
        return form_of_row, form_of_row if column == row else form(column)

    def _codes(self, w_NK: Tensor, call: LayerCall) -> Callable[[bool], Prepared] | None:
        """A function that gives the codes of a gathered weight in each pass, as they came for it;
        None: the backend quantises its values.
        """
        if not isinstance(w_NK, Gathered) or w_NK.source.rounds or self.plan.why_values is not None:
            return None
        return lambda column: call.weights.prepared(w_NK, self.w[column], call)

    def _summed(
        self, w_NK: Tensor, *, values: bool = True
    ) -> tuple[Tensor, Callable[[Any], Tensor] | None]:
        """(The weight, or those of a group, as kernels take it; what gives the float32 that dw is
        added to).

        That is the gradient of a parameter, gathered ones included: 8 bytes per weight and
        microbatch. What is no parameter (a transposed one), or is to be added by autograd, gets
        zeros, which autograd adds to the parameter's after the GEMM: 4 + 8 + 12.

        Args:
            values: whether they read its values.
        """
        into = None
        zeros = list[Tensor]()
        by_autograd = self.sums == "autograd" or not w_NK.is_leaf
        if self.sums and w_NK.dtype == torch.float32:
            if by_autograd:
                into = partial(zeros_held, w_NK, zeros)
            else:
                into = partial(_sum_of, w_NK)
        if isinstance(w_NK, Gathered) or (into is not None and by_autograd):
            return ValuesFunction.apply(w_NK, zeros, values), into  # type: ignore[no-untyped-call]
        return w_NK.contiguous(), into


class ValuesFunction(torch.autograd.Function):
    """The values of a weight, contiguous and without a copy where they lie so: those of a gathered
    one as they came, or, without `values`, itself, which has none.

    Its gradient is what is returned for them, or what `summed` holds then.
    """

    @staticmethod
    def forward(ctx: Any, w_NK: Tensor, summed: list[Tensor], values: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.summed = summed
        ctx.dtype = w_NK.dtype
        if isinstance(w_NK, Gathered):
            return (w_NK.held() if values else w_NK).detach()
        return w_NK.contiguous().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw_NK: Tensor | None) -> tuple[Tensor | None, None, None]:
        dw_NK = ctx.summed.pop() if ctx.summed else dw_NK
        return None if dw_NK is None else dw_NK.to(ctx.dtype), None, None


def _sum_of(w_NK: Tensor, node: Node) -> Tensor:
    """The gradient of a parameter, zeros at first; zeros for nobody in a pass that leaves gradients
    as they are.

    Raises:
        RuntimeError: torch.autograd.grad is to return it.
    """
    if (adds := accumulates(node)) is None:
        raise RuntimeError(
            f"torch.autograd.grad of a weight {tuple(w_NK.shape)} whose product adds dw to "
            "`.grad`: take that after "
            "backward(), or leave the sum to autograd: layer.sum_gradients(True, "
            "in_product=False), before it runs"
        )
    if not adds:
        return zeros_held(w_NK, [], node)
    if w_NK.grad is None:
        w_NK.grad = torch.zeros(w_NK.shape, dtype=w_NK.dtype, device=w_NK.device)
    return w_NK.grad


def zeros_held(w_NK: Tensor, held: list[Tensor], node: Node) -> Tensor:
    """float32 zeros of the shape of a weight, appended to `held`."""
    held.append(torch.zeros(w_NK.shape, dtype=torch.float32, device=w_NK.device))
    return held[-1]
