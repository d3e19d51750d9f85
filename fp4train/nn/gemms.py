"""The three GEMMs of a linear layer, each on its own backend, and the autograd function that runs them.

With q(·) the quantisation of an operand by the layer's table (the identity for high precision),

    fprop   y  [M, N] = q(x) [M, K] · q(w) [N, K]ᵀ + bias
    dgrad   dx [M, K] = q(dy) [M, N] · q(wᵀ) [K, N]ᵀ
    wgrad   dw [N, K] = q(dyᵀ) [N, M] · q(xᵀ) [K, M]ᵀ

Row-wise and column-wise forms are each quantised from the high-precision tensor: the transpose of a quantised tensor
differs from the quantised transpose, except for square blocks. The layer's plan selects everything; there are no flags.
For backward, q(xᵀ) is saved as packed codes and scales (4.5 bits per element for NVFP4) instead of x.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import BACKENDS, Backend, Prepared
from fp4train.nn.call import Call
from fp4train.nn.weights import WeightForm
from fp4train.precision.context import Context
from fp4train.precision.plan import LayerPlan
from fp4train.quantize import Decoded, PairQuantizer, Quantized, QuantSpec, RandomKey, quantizer
from fp4train.quantize.random import DGRAD_DY, FPROP_X, WGRAD_DY, WGRAD_X


class Gradients(NamedTuple):
    """The dtypes of the gradients that backward computes; None for those it does not."""

    x: torch.dtype | None
    w: torch.dtype | None
    bias: torch.dtype | None


def gradients_of(x: Tensor, w: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> Gradients:
    """The gradient dtypes of those of x, w and bias that are `wanted`."""
    return Gradients(
        x.dtype if wanted[0] else None,
        w.dtype if wanted[1] else None,
        bias.dtype if bias is not None and wanted[2] else None,
    )


def torch_autocasts(device: str) -> bool:
    """Whether torch.autocast is on for this device type; "meta" has no autocast."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_torchs_autocast(device: str) -> AbstractContextManager[object]:
    """Disable torch.autocast: the GEMMs choose their own dtypes, and it must not cast their operands again."""
    return torch.autocast(device, enabled=False) if torch_autocasts(device) else nullcontext()


class Form:
    """One form of x or dy: row-wise, or column-wise (that of the transposed tensor, along tokens).

    Args:
        tensor: "x" or "dy".
        operand: index of the operand, for the random key.
        spec: quant spec; None for high precision.
        codes: prepare codes, to save them or for a backend that multiplies codes; else decoded values.
    """

    __slots__ = ("codes", "column", "delayed", "make", "operand", "pure", "spec", "stochastic", "tensor")

    def __init__(
        self, tensor: str, operand: int, spec: QuantSpec | None, device: str, *, codes: bool, column: bool
    ) -> None:
        self.tensor, self.operand, self.spec, self.codes, self.column = tensor, operand, spec, codes, column
        self.stochastic = spec is not None and spec.random
        self.delayed = spec is not None and spec.delayed is not None
        self.pure = not self.stochastic and not self.delayed
        """Whether it is a function of the tensor alone."""
        if spec is not None:
            chosen = quantizer(spec, device)
            self.make = chosen.codes if codes else chosen.values

    def prepare(self, x_MK: Tensor, call: Call) -> Prepared:
        """This form of x [M, K]."""
        if self.column:
            x_MK = x_MK.T
        if self.spec is None:
            return Decoded(x_MK, None)
        if self.pure:
            return self.make(x_MK)
        return self.make(x_MK, *self.arguments(x_MK, call))

    def arguments(self, x: Tensor, call: Call) -> tuple[RandomKey | None, Tensor | None]:
        """(random bits, delayed amax) of a form that is not pure."""
        key = call.key(self.operand, along_tokens=self.column) if self.stochastic else None
        return key, call.amax(self.tensor, self.spec, x) if self.delayed and self.spec is not None else None


class Forms:
    """Both forms of x or dy, from one read of the tensor if a kernel supports that."""

    __slots__ = ("column", "pair", "pure", "row")

    def __init__(self, row: Form, column: Form, device: str) -> None:
        self.row, self.column = row, column
        self.pure = row.pure and column.pure
        self.pair = None
        if row.spec is not None and column.spec is not None:
            self.pair = PairQuantizer(
                quantizer(row.spec, device),
                quantizer(column.spec, device),
                row_codes=row.codes,
                column_codes=column.codes,
            )

    def prepare(
        self, x_MK: Tensor, call: Call, *, row: bool = True, column: bool = True
    ) -> tuple[Prepared | None, Prepared | None]:
        """(row-wise form, column-wise form) of x [M, K]; None for what is not asked for."""
        if row and column and self.pair is not None:
            if self.pure:
                return self.pair(x_MK)
            return self.pair(x_MK, *self.row.arguments(x_MK, call), *self.column.arguments(x_MK, call))
        return self.row.prepare(x_MK, call) if row else None, self.column.prepare(x_MK, call) if column else None


class LayerGemms:
    """The GEMMs of one layer, ready to run: its plan with backends and quantizers looked up."""

    __slots__ = (
        *("device", "dgrad", "dtype", "dy", "fprop", "keeps_x", "plan", "quantised", "together", "w_column", "w_row"),
        *("wgrad", "x"),
    )

    def __init__(self, plan: LayerPlan, device: str) -> None:
        self.plan, self.device = plan, device
        self.quantised, self.together = plan.quantised, plan.layer_backend
        self.dtype = dtype = plan.table.torch_dtype
        # A backend that runs layers as a whole does not use these objects.
        backends: list[Backend] = [BACKENDS.get(gemm.backend, BACKENDS["emulate"]) for gemm in plan.gemms]
        self.fprop, self.dgrad, self.wgrad = backends
        fprop, dgrad, wgrad = (gemm.operands for gemm in plan.gemms)
        self.keeps_x = wgrad.second is None
        """Whether wgrad takes x in high precision; backward then needs x itself."""

        def form(tensor: str, operand: int, spec: QuantSpec | None, codes: bool, *, column: bool = False) -> Form:
            return Form(tensor, operand, spec, device, codes=codes, column=column)

        self.x = Forms(
            form("x", FPROP_X, fprop.first, self.fprop.takes_codes),
            form("x", WGRAD_X, wgrad.second, codes=True, column=True),
            device,
        )
        self.dy = Forms(
            form("dy", DGRAD_DY, dgrad.first, self.dgrad.takes_codes),
            form("dy", WGRAD_DY, wgrad.first, self.wgrad.takes_codes, column=True),
            device,
        )
        self.w_row = WeightForm(fprop.second, self.fprop, dtype, device, column=False)
        self.w_column = WeightForm(dgrad.second, self.dgrad, dtype, device, column=True)

    def forward(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: Call,
        gradients: Gradients,
        context: Context | None,
    ) -> tuple[Tensor, Quantized | Tensor | None]:
        """(y [M, N] in the recipe's dtype, x for wgrad: q(xᵀ), x in high precision, or None).

        Consecutive layers that read the same tensor (queries, keys and values; gate and up) share its prepared forms,
        so one copy is saved for backward.

        Args:
            context: cache of the shared forms; None: no sharing. Calls from compiled graphs pass None, because a graph
                reuses the memory of its tensors.
        """
        x_MK = x_MK.to(self.dtype)
        keeps_codes = gradients.w is not None and not self.keeps_x
        shares = context is not None and self.x.pure and not x_MK.is_inference()
        made: Any = self._shared(x_MK, context, keeps_codes) if shares else None
        if made is None:
            made = self.x.prepare(x_MK, call, column=keeps_codes)
            if shares and context is not None:
                context.shared["input"] = (self._what(keeps_codes), x_MK._version, x_MK, made)
        b = call.weights.form(w_NK, self.w_row, call)
        y_MN = self.fprop.product(made[0], b, out_dtype=self.dtype, bias=bias_N)
        return y_MN, x_MK if gradients.w is not None and self.keeps_x else made[1]

    def _what(self, keeps_codes: bool) -> tuple[object, ...]:
        """The forms of an input that this layer needs; layers for which they are equal can share."""
        return (self.x.row.spec, self.x.row.codes, self.x.column.spec if keeps_codes else None)

    def _shared(self, x_MK: Tensor, context: Context | None, keeps_codes: bool) -> Any:
        """The prepared forms that the layer before left of the same input, or None.

        The context keeps a reference to the tensor, so that its memory is not reused meanwhile.
        """
        seen = None if context is None else context.shared.get("input")
        if seen is None or seen[0] != self._what(keeps_codes):
            return None
        _, version, x, made = seen
        return made if version == x_MK._version and x.is_set_to(x_MK) else None

    def backward(
        self, dy_MN: Tensor, w_NK: Tensor | None, x: Quantized | Tensor | None, call: Call, gradients: Gradients
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dx [M, K], dw [N, K], dbias [N]), None for those not wanted; `x` is the second result of `forward`."""
        dtype = self.dtype
        dy = dy_MN.to(dtype)
        dx_MK = dw_NK = dbias_N = None
        row, column = self.dy.prepare(dy, call, row=gradients.x is not None, column=gradients.w is not None)
        if row is not None:
            assert w_NK is not None and gradients.x is not None
            w = call.weights.form(w_NK, self.w_column, call)
            dx_MK = self.dgrad.product(row, w, out_dtype=dtype).to(gradients.x)
        if column is not None:
            assert x is not None and gradients.w is not None
            b: Prepared = Decoded(x.T, None) if isinstance(x, Tensor) else x
            dw_NK = self.wgrad.product(column, b, out_dtype=dtype).to(gradients.w)
        if gradients.bias is not None:
            dbias_N = dy.sum(0, dtype=torch.float32).to(gradients.bias)
        return dx_MK, dw_NK, dbias_N


class LinearFunction(torch.autograd.Function):
    """y of (x_MK, w_NK, bias_N, call, context). Tensors are saved through autograd, so its hooks and checks apply."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, call: Call, context: Context) -> Tensor:
        gradients = gradients_of(x_MK, w_NK, bias_N, ctx.needs_input_grad)
        y_MN, x = call.gemms.forward(x_MK, w_NK, bias_N, call, gradients, context)
        w = w_NK if gradients.x is not None else None
        if isinstance(x, Quantized):
            ctx.save_for_backward(w, x.codes, x.scales, x.amax)
            ctx.x = (x.spec, x.shape)
        else:
            ctx.save_for_backward(w, x)
            ctx.x = None
        ctx.call, ctx.gradients = call, gradients
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        w_NK, x, *others = ctx.saved_tensors
        if ctx.x is not None:
            spec, shape = ctx.x
            x = Quantized(spec, shape, x, others[0], others[1])
        if torch_autocasts(call.gemms.device):
            with without_torchs_autocast(call.gemms.device):
                return (*call.gemms.backward(dy_MN, w_NK, x, call, ctx.gradients), None, None)
        return (*call.gemms.backward(dy_MN, w_NK, x, call, ctx.gradients), None, None)
