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
from fp4train.nn.forms import Form, Forms
from fp4train.nn.place import Place
from fp4train.nn.token_shards import gathered, whole_blocks
from fp4train.nn.weights import WeightForm
from fp4train.precision.context import Context
from fp4train.precision.plan import LayerPlan
from fp4train.quantize import Decoded, Quantized, quantizer
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


class LayerGemms:
    """The GEMMs of one layer, ready to run: its plan with backends and quantizers looked up.

    Args:
        device: device type of the layer's tensors.
        place: where the layer's shard lies in the whole layer; None: the layer is whole and alone.
        sums: whether dw is a part of a sum, over microbatches or ranks: it is then not rounded to the recipe's dtype.
        term: whether y is a term of a sum, over parts of the in features: the same.
    """

    __slots__ = (
        *("device", "dgrad", "dtype", "dw_dtype", "dx_dtype", "dy", "fprop", "keeps_x", "place", "plan", "quantised"),
        *("sent_dy", "sent_x", "together", "w_column", "w_row", "wgrad", "x", "y_dtype"),
    )

    def __init__(
        self, plan: LayerPlan, device: str, place: Place | None = None, *, sums: bool = False, term: bool = False
    ) -> None:
        self.plan, self.device, self.place = plan, device, place
        self.quantised, self.together = plan.quantised, plan.layer_backend
        self.dtype = dtype = plan.table.torch_dtype
        # Partial sums over ranks, or parts of the channels, stay in float32 until they are added.
        self.y_dtype = torch.float32 if term or (place is not None and place.sums) else dtype
        self.dx_dtype = torch.float32 if place is not None and place.gathers else dtype
        # A backend that runs layers as a whole does not use these objects.
        backends: list[Backend] = [BACKENDS.get(gemm.backend, BACKENDS["emulate"]) for gemm in plan.gemms]
        self.fprop, self.dgrad, self.wgrad = backends
        fprop, dgrad, wgrad = (gemm.operands for gemm in plan.gemms)
        self.dw_dtype = torch.float32 if sums and self.wgrad.writes_float32(wgrad.first) else dtype
        self.keeps_x = wgrad.second is None
        """Whether wgrad takes x in high precision; backward then needs x itself."""

        def forms(tensor: str, row_codes: bool, column_codes: bool, tokens: bool = False) -> Forms:
            x = tensor == "x"
            row_spec, column_spec = (fprop.first, wgrad.second) if x else (dgrad.first, wgrad.first)
            of_row, of_column = (FPROP_X, WGRAD_X) if x else (DGRAD_DY, WGRAD_DY)
            return Forms(
                Form(tensor, of_row, row_spec, device, codes=row_codes, column=False, place=place, tokens=tokens),
                Form(
                    tensor, of_column, column_spec, device, codes=column_codes, column=True, place=place, tokens=tokens
                ),
                device,
            )

        self.x = forms("x", self.fprop.takes_codes, column_codes=True)
        self.dy = forms("dy", self.dgrad.takes_codes, self.wgrad.takes_codes)
        self.sent_x = self.sent_dy = None
        """The forms that are made of this rank's tokens and sent as codes; None: the tensor itself is gathered."""
        if place is not None and place.sends_codes:
            if place.gathers and fprop.first is not None:
                self.sent_x = forms("x", row_codes=True, column_codes=True, tokens=True)
            elif place.sums and dgrad.first is not None and wgrad.first is not None:
                self.sent_dy = forms("dy", row_codes=True, column_codes=True, tokens=True)
        self.w_row = WeightForm(fprop.second, self.fprop, dtype, device, column=False, place=place)
        self.w_column = WeightForm(dgrad.second, self.dgrad, dtype, device, column=True, place=place)

    def forward(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: Call,
        gradients: Gradients,
        context: Context | None,
    ) -> tuple[Tensor, Quantized | Tensor | None]:
        """(y [M, N] in the recipe's dtype or, of a term, in float32; x for wgrad: q(xᵀ), x in high precision, or None).

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
            if self.sent_x is not None and whole_blocks(self.sent_x.column.spec, x_MK.shape[0]):
                row, column = self.sent_x.prepare(x_MK, call, column=keeps_codes)
                made = self._received(row, codes=self.fprop.takes_codes), column
            else:
                made = self.x.prepare(self._whole(x_MK, context), call, column=keeps_codes)
            if shares and context is not None:
                context.shared["input"] = (self._what(keeps_codes), x_MK._version, x_MK, made)
        b = call.weights.form(w_NK, self.w_row, call)
        if self.place is not None and self.place.sums:
            y_MN = self.place.whole_output(self.fprop.product(made[0], b, out_dtype=self.y_dtype), bias_N, self.dtype)
        else:
            y_MN = self.fprop.product(made[0], b, out_dtype=self.y_dtype, bias=bias_N)
        return y_MN, x_MK if gradients.w is not None and self.keeps_x else made[1]

    def _received(self, part: Prepared | None, *, codes: bool, along_tokens: bool = False) -> Any:
        """A form of all tokens from the codes that each rank made of its own."""
        if part is None:
            return None
        assert isinstance(part, Quantized) and self.place is not None and self.place.tensor is not None
        whole = gathered(part, self.place.tensor, along_tokens=along_tokens)
        return whole if codes else quantizer(whole.spec, self.device).decode(whole)

    def _whole(self, x_MK: Tensor, context: Context | None) -> Tensor:
        """x of all tokens; layers that read the same tensor gather it once."""
        if self.place is None or not self.place.gathers or not self.place.sequence:
            return x_MK
        seen = None if context is None else context.shared.get("gathered")
        if seen is not None and seen[0] == x_MK._version and seen[1].is_set_to(x_MK):
            whole: Tensor = seen[2]
            return whole
        whole = self.place.whole_input(x_MK)
        if context is not None and not x_MK.is_inference():
            context.shared["gathered"] = (x_MK._version, x_MK, whole)
        return whole

    def _what(self, keeps_codes: bool) -> tuple[object, ...]:
        """The forms of an input that this layer needs; layers for which they are equal can share."""
        row, column = self.x.row, self.x.column
        return (row.spec, row.codes, column.spec if keeps_codes else None, row.holders, column.holders)

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
        wants_row, wants_column = gradients.x is not None, gradients.w is not None
        sent = self.sent_dy is not None and whole_blocks(self.sent_dy.column.spec, dy.shape[0])
        if sent and self.sent_dy is not None:
            row, column = self.sent_dy.prepare(dy, call, row=wants_row, column=wants_column)
            row = self._received(row, codes=self.dgrad.takes_codes)
            column = self._received(column, codes=self.wgrad.takes_codes, along_tokens=True)
        else:
            dy = dy if self.place is None else self.place.whole_dy(dy)
            row, column = self.dy.prepare(dy, call, row=wants_row, column=wants_column)
        if row is not None:
            assert w_NK is not None and gradients.x is not None
            w = call.weights.form(w_NK, self.w_column, call)
            dx_MK = self.dgrad.product(row, w, out_dtype=self.dx_dtype)
            if self.place is not None:
                dx_MK = self.place.whole_dx(dx_MK).to(dtype)
            dx_MK = dx_MK.to(gradients.x)
        if column is not None:
            assert x is not None and gradients.w is not None
            if isinstance(x, Tensor) and self.place is not None:
                x = self.place.whole_input(x)
            elif isinstance(x, Quantized) and self.sent_x is not None and x.shape[1] != dy.shape[0]:
                x = self._received(x, codes=True, along_tokens=True)
            b: Prepared = Decoded(x.T, None) if isinstance(x, Tensor) else x
            dw_NK = self.wgrad.product(column, b, out_dtype=self.dw_dtype).to(gradients.w)
        if gradients.bias is not None:
            dbias_N = dy.sum(0, dtype=torch.float32)
            if sent and self.place is not None and self.place.tensor is not None:
                dbias_N = self.place.tensor.sum(dbias_N)
            dbias_N = dbias_N.to(gradients.bias)
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
