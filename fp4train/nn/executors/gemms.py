"""The three GEMMs of a linear layer, each on its own backend.

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

from typing import Any

import torch
from torch import Tensor

from fp4train.backends import BACKENDS, Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import (
    CompiledRoute,
    Gradients,
    PreparedPair,
    ProductExecutor,
    Saved,
    adds,
    fuses,
)
from fp4train.nn.held_amaxes import HeldAmaxes
from fp4train.nn.operands import TensorForms
from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weight_form import WeightForm
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Decoded, Hadamard, Quantized, quantizer


class Gemms(ProductExecutor):
    """The GEMMs of one layer, ready to run: its plan with backends and quantizers looked up.

    Attributes:
        y_dtype: dtype of y.
    """

    kinds = (DelayedScaling, HeldAmaxes)

    def build(self) -> None:
        plan = self.plan
        device = self.device
        shard = self.shard
        dtype = self.dtype
        self.fprop, self.dgrad, self.wgrad = (
            BACKENDS[gemm.backend].summing(gemm.operands.accumulator) for gemm in plan.gemms
        )
        fprop, dgrad, wgrad = (gemm.operands for gemm in plan.gemms)
        self.y_dtype = dtype
        if self.sums and self.wgrad.writes_float32(wgrad.first):
            self.dw_dtype = torch.float32
        else:
            self.dw_dtype = dtype
        self.keeps_x = plan.sources["wgrad", "x"].codes is None
        """Whether wgrad takes x in high precision; backward then needs x itself."""
        self.adds = self.wgrad.adds and adds(dtype, device, self.sums)
        self.joins = fuses(device) and self.dgrad.both is not None
        """Whether a backend launches less for dgrad and wgrad at once."""
        codes = (self.fprop.takes_codes, not plan.keeps_values)
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
        operands["dgrad", "w"].check_values(operands["fprop", "w"])
        self.values_of_w = operands["dgrad", "w"].values
        if operands["dgrad", "w"].prepared_operand == operands["fprop", "w"]:
            self.w_column = self.w_row
        else:
            self.w_column = WeightForm(
                operands["dgrad", "w"], self.dgrad, dtype, device, shard=shard, fused=plan.fused
            )
            self.w_row.pair_with(self.w_column)
        specs = [spec for pair in (fprop, dgrad, wgrad) for spec in pair.both if spec is not None]
        if any(spec.delayed is not None for spec in specs):
            self.states = (DelayedScaling.kind,)
        elif any(spec.held is not None for spec in specs):
            self.states = (HeldAmaxes.kind,)
        self.route = CompiledRoute("operator", dtype, self.keeps_x)

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

    def forward(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: LayerCall,
    ) -> tuple[Tensor, Saved]:
        """(y [M, N] in `y_dtype`, the weight and a form of x).

        Consecutive layers that read the same tensor (queries, keys and values; gate and up) share
        its prepared forms, so one copy is saved for backward. The cache keeps a reference to the
        tensor, so that its memory is not reused meanwhile.
        """
        x_MK = x_MK.to(self.dtype)
        gradients = call.gradients
        keeps_codes = gradients.w is not None and not self.keeps_x
        forms: PreparedPair | None = None
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
            forms = self.x.prepare(x_MK, call, True, keeps_codes)
            if shared is not None:
                shared["input"] = (wants, x_MK._version, x_MK, forms)
        row, column = forms
        assert row is not None
        other = scale_of(row) if self.joins else None
        b = call.weights.prepared(w_NK, self.w_row, call, other=other)
        y_MN = self.fprop.product(row, b, out_dtype=self.y_dtype, bias=bias_N)
        saved_x: Any = x_MK if gradients.w is not None and self.keeps_x else column
        return y_MN, (None if gradients.x is None else w_NK, saved_x)

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: LayerCall,
        total: Tensor | None = None,
    ) -> Gradients:
        """See `ProductExecutor.backward`."""
        w_NK, x = saved
        dy = dy_MN.to(self.dtype)
        gradients = call.gradients
        dx_MK = dw_NK = dbias_N = None
        of_dx = of_dw = both = None
        w: Any = None
        b: Any = None
        if gradients.x is not None:
            assert isinstance(w_NK, Tensor)
            w = call.weights.prepared(w_NK, self.w_column, call)
            if self.values_of_w is not None:
                w = Decoded(self.values_of_w(w, self.dtype).T, None)
        if gradients.w is not None:
            assert x is not None
            if self.x.values is not None and isinstance(x, Quantized):
                x = self.x.values(x, self.dtype)
            b = Decoded(x.T, None) if isinstance(x, Tensor) else x
            if isinstance(b, Quantized) and not self.wgrad.takes_codes:
                b = decoded_once(b, call)
        factor_scales: tuple[Tensor, ...] = ()
        if self.joins and total is None:
            scales = scale_of(w), scale_of(b)
            if scales[0] is not None and scales[1] is not None:
                factor_scales = scales[0], scales[1]
        row, column = self.dy.prepare(dy, call, w is not None, b is not None, *factor_scales)
        if row is not None:
            of_dx = row, w
        if column is not None:
            of_dw = column, b
        if self.joins and of_dx and of_dw and self.dgrad is self.wgrad:
            both = self.dgrad.both(of_dx, of_dw, (self.dtype, self.dw_dtype), total)
        if of_dx is not None:
            assert gradients.x is not None
            product = both[0] if both else self.dgrad.product(*of_dx, out_dtype=self.dtype)
            dx_MK = product.to(gradients.x)
        if of_dw is not None and total is None:
            assert gradients.w is not None
            product = both[1] if both else self.wgrad.product(*of_dw, out_dtype=self.dw_dtype)
            dw_NK = product.to(gradients.w)
        elif of_dw is not None and total is not None and both is None:
            self.wgrad.add(total, *of_dw)
        if gradients.bias is not None:
            dbias_N = dy.sum(0, dtype=torch.float32).to(gradients.bias)
        return dx_MK, dw_NK, dbias_N


def scale_of(operand: Prepared | None) -> Tensor | None:
    """The scale of an operand's values, where a tensor has one."""
    if isinstance(operand, Decoded) and operand.scale is not None and not operand.scale.dim():
        return operand.scale
    return None


def decoded_once(x: Quantized, call: LayerCall) -> Decoded:
    """The values of codes that were saved; those of layers that read one tensor, whose backward
    passes follow each other, are made once.
    """
    shared = call.shared
    seen = None if shared is None else shared.get("decoded")
    if seen is not None and seen[0].is_set_to(x.codes):
        kept: Decoded = seen[1]
        return kept
    values = quantizer(x.spec, x.codes.device.type).decode(x)
    if shared is not None:
        shared["decoded"] = (x.codes, values)
    return values
