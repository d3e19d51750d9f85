"""Weights prepared once an optimizer step, not once a microbatch or a GEMM.

What a GEMM multiplies is a function of the weight, of the spec and, under stochastic rounding, of seed and step. It is
kept while the step stays the same, which the autocast context tells. torch's version counter cannot: the fused
optimizers change weights without raising it. For square blocks the column-wise operand is the transpose of the
row-wise one, a view.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4train.backends import emulate
from fp4train.quantize import Decoded, Quantized, QuantSpec
from fp4train.quantize.random import DGRAD_W, FPROP_W

if TYPE_CHECKING:
    from fp4train.nn.call import Call


class PreparedWeights:
    """The prepared forms of one weight [N, K]."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] | None = None
        self._weight: Tensor | None = None
        self._forms: dict[tuple[object, ...], Decoded | Quantized] = {}
        self._amax: Tensor | None = None
        self._entered = False

    def __reduce__(self) -> tuple[type[PreparedWeights], tuple[()]]:
        """Copies and pickles start empty: the forms belong to another tensor, and are quickly made."""
        return PreparedWeights, ()

    def rowwise(
        self, w_NK: Tensor, spec: QuantSpec | None, gemm: ModuleType, dtype: torch.dtype, call: Call
    ) -> Decoded | Quantized:
        """w for fprop: blocked along in_features."""
        return self._form(w_NK, spec, gemm, dtype, call, transposed=False)

    def columnwise(
        self, w_NK: Tensor, spec: QuantSpec | None, gemm: ModuleType, dtype: torch.dtype, call: Call
    ) -> Decoded | Quantized:
        """wᵀ [K, N] for dgrad: blocked along out_features."""
        if gemm is emulate and (spec is None or spec.transposable):
            form = self._form(w_NK, spec, gemm, dtype, call, transposed=False)
            assert isinstance(form, Decoded)
            return Decoded(values=form.values.T, scale=form.scale)
        return self._form(w_NK, spec, gemm, dtype, call, transposed=True)

    def _form(
        self,
        w_NK: Tensor,
        spec: QuantSpec | None,
        gemm: ModuleType,
        dtype: torch.dtype,
        call: Call,
        *,
        transposed: bool,
    ) -> Decoded | Quantized:
        version = 0 if w_NK.is_inference() else w_NK._version
        of = (call.position, version, w_NK.data_ptr(), w_NK.device)
        if of != self._of:
            # Holding on to the weight makes its address a proof of identity.
            self._of, self._weight = of, w_NK.detach()
            self._forms.clear()
            self._amax, self._entered = None, False
        w = w_NK.detach()
        amax = self._delayed_amax(w, spec, call)
        slot = (spec, gemm.__name__, dtype, transposed)
        if slot not in self._forms:
            # Quantised from the master weight, rounded once; a weight in high precision takes the recipe's dtype.
            w = w.to(dtype) if spec is None else w
            key = call.weight_key(DGRAD_W if transposed else FPROP_W)
            self._forms[slot] = gemm.prepare(w.T if transposed else w, spec, key=key, amax=amax)
        return self._forms[slot]

    def _delayed_amax(self, w_NK: Tensor, spec: QuantSpec | None, call: Call) -> Tensor | None:
        """The weight's delayed amax, which enters the history once a step, at its first call in training."""
        if spec is None or spec.delayed is None:
            return None
        if self._amax is None or (call.training and not self._entered):
            self._amax = call.scaling.amax("w", spec, w_NK, enter=call.training)
            self._entered = call.training
        return self._amax
