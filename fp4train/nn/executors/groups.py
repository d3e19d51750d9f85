"""The GEMMs of a group of weights, each for its own rows of x: those of a linear layer, one weight
after the other.

    y [M, N]: rows of weight e are q(x_e) · q(w_e)ᵀ      dx likewise      dw [E, N, K]: dw_e = q(dy_eᵀ) · q(x_eᵀ)ᵀ

Each weight is multiplied as a layer of its own, so its amaxes, blocks and random bits are those of
one. Rows are padded to whole blocks where they are quantised, weight by weight. A weight without
rows is not prepared and not multiplied; under delayed scaling or held amaxes its call enters an amax
of 0, so that all ranks have the same states.

Products are made one by one, or in one call where the plan says so (`Gemm.grouped`); operands are
the same, and are prepared one by one. The emulation has no such call: torch's grouped product of a
CPU writes the operands' dtype only, and it needs float32, to apply the global scales before it
rounds.
"""

import copy
from typing import Any, cast

from torch import Tensor

from fp4train.backends import ExpertKernels
from fp4train.backends.grouped import Products
from fp4train.nn.call import GroupCall
from fp4train.nn.engine import (
    Executor,
    Gradients,
    GradientSum,
    ProductExecutor,
    Saved,
)
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.precision.layer_plan import LayerPlan


class GroupGemms(ProductExecutor):
    """Runs the executor of one weight for each weight of a group.

    Args:
        kind: the class of that executor.
        arguments, sums: plan, device and shard, see `Executor`.
    """

    def __init__(self, kind: type[Executor], *arguments: Any, sums: GradientSum) -> None:
        self.kind = kind
        super().__init__(*arguments, sums=sums)

    def build(self) -> None:
        # without `shard`: a rank has each of its weights whole
        self.member = self.kind(self.plan, self.device, sums=self.sums)
        self.states = self.member.states
        self.adds = self.sums == "product"

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        rows = (
            f"{plan.layer.name}: the host reads how many rows each of its {plan.layer.experts} "
            "experts has"
        )
        return super().why_no_graph(plan) or rows

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        return self.member.quantised_columns(x_MK, w_NK)

    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: GroupCall) -> Tensor:
        self.member.begin(call.calls, x_MK[: sum(call.counts)])
        return super().__call__(x_MK.to(self.dtype), w, bias, call)

    def forward(
        self,
        x_MK: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: GroupCall,
    ) -> tuple[Tensor, Saved]:
        y_MN = x_MK.new_empty(x_MK.shape[0], w.shape[1])
        y_MN[sum(call.counts) :] = 0
        saved: list[Any] = [None if call.gradients.x is None else w]
        executor, products = _grouped_products(call, "fprop")
        for member, rows in call.used():
            bias_N = None if bias is None else bias[member.member]
            y_part, (_, *forms) = executor.forward(x_MK[rows], w[member.member], bias_N, member)
            if products is None:
                y_MN[rows] = y_part
            saved += forms
        _put_all(y_MN, products, call)
        return y_MN, saved

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: GroupCall,
        total: Tensor | None = None,
    ) -> Gradients:
        w, *forms = saved
        experts, out_features, in_features = call.shape
        gradients = call.gradients
        dx = dw = dbias = None
        if gradients.x is not None:
            dx = dy_MN.new_empty((len(dy_MN), in_features), dtype=gradients.x)
            dx[sum(call.counts) :] = 0
        idle = [number for number, count in enumerate(call.counts) if not count]
        if gradients.w is not None and total is None:
            dw = dy_MN.new_empty(call.shape, dtype=gradients.w)
            dw[idle] = 0
        if gradients.bias is not None:
            dbias = dy_MN.new_empty((experts, out_features), dtype=gradients.bias)
            dbias[idle] = 0
        executor, products = _grouped_products(call, "dgrad")
        used = [*call.used()]
        count = len(forms) // max(1, len(used))
        for number, (member, rows) in enumerate(used):
            at = member.member
            w_NK = w[at] if isinstance(w, Tensor) else None
            forms_of_member = forms[number * count : (number + 1) * count]
            total_NK = None if total is None else total[at]
            dx_part, dw_NK, dbias_N = executor.backward(
                dy_MN[rows], (w_NK, *forms_of_member), member, total_NK
            )
            _put(dx, rows, dx_part if products is None else None)
            _put(dw, at, dw_NK)
            _put(dbias, at, dbias_N)
        _put_all(dx, products, call)
        return dx, dw, dbias


class BackendExperts(BackendLayer):
    """Experts whose GEMMs a backend runs together."""

    why_no_graph = GroupGemms.why_no_graph

    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        kernels = cast(ExpertKernels, call.states[self.states[0]])
        w_ENK, into = self._summed(w)
        return kernels(x_MK, w_ENK, bias, self.table, call.counts, into=into)


def _put(target: Tensor | None, at: slice | int, part: Tensor | None) -> None:
    """Set a part of a gradient that is wanted."""
    if target is not None and part is not None:
        target[at] = part


def _grouped_products(call: GroupCall, gemm: str) -> tuple[Any, Products | None]:
    """(The executor of one weight for this GEMM, what its products are put into to be made in one
    call; None: each is made by itself).
    """
    executor = call.calls[0].executor
    if executor.device == "meta" or not getattr(executor.plan, gemm).grouped:
        return executor, None
    products = Products(getattr(executor, gemm))
    copied = copy.copy(executor)
    setattr(copied, gemm, products)
    return copied, products


def _put_all(target: Tensor | None, products: Products | None, call: GroupCall) -> None:
    """Make the products, and set their rows."""
    if target is not None and products is not None:
        for (_, rows), part in zip(call.used(), products.made(), strict=True):
            target[rows] = part
