"""Weights prepared once per optimizer step, not once per microbatch or GEMM.

The prepared form of a weight is a function of the weight, of the spec and, under stochastic rounding, of seed and step.
It is cached while the seed and step of the autocast context stay the same. torch's version counter alone is not enough:
the fused optimizers change weights without incrementing it. For square blocks the column-wise form is the transpose of
the row-wise form, a view.

The cache belongs to one weight, to which it holds a weak reference, and is cleared with it. No address is compared.
Where a weight is gathered for the time of a call only (FSDP), no form is kept: those of all layers would be a whole
model on every rank.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.nn.call import Call
from fp4train.nn.gathered import Gathered
from fp4train.nn.place import Place, Ranks, amax_over
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, amax_extent, quantizer, requantised
from fp4train.quantize.random import DGRAD_W, FPROP_W


class WeightForm:
    """The form of the weight [N, K] that one GEMM needs: spec, backend, row-wise or column-wise (wᵀ).

    Args:
        device: device type of the weight.
        column: whether the form is that of wᵀ, blocked along out_features, for dgrad.
        place: where the weight lies in the whole layer's; None: it is whole.
    """

    __slots__ = (
        *("before", "decode", "dtype", "holders", "key", "make", "operand", "requantise", "spec", "start"),
        "transposed",
    )

    def __init__(
        self,
        spec: QuantSpec | None,
        backend: Backend,
        dtype: torch.dtype,
        device: str,
        *,
        column: bool,
        place: Place | None = None,
    ) -> None:
        self.spec, self.dtype = spec, dtype
        # For square blocks and for high precision one set of values serves both forms: one is a view of the other.
        self.transposed = column and (spec is None or (spec.transposable and not backend.takes_codes))
        self.operand = DGRAD_W if column and not self.transposed else FPROP_W
        turned = self.operand == DGRAD_W
        self.holders: tuple[Ranks, ...] = ()
        self.before: tuple[Ranks, ...] = ()
        if place is not None and spec is not None:
            self.holders = place.holders("w", spec, transposed=turned)
            self.before = place.holders_before("w", spec, transposed=turned)
        if spec is not None:
            rest = quantizer(replace(spec, requantises=None), device)
            chosen = rest if self.before else quantizer(spec, device)
            self.make, self.requantise = (each.codes if backend.takes_codes else each.values for each in (chosen, rest))
            self.decode = None if backend.takes_codes else chosen.decode
        self.key = (spec, backend.name, dtype, column and not self.transposed)
        start = (0, 0) if place is None else place.starts("w")
        self.start = (start[1], start[0]) if turned else start

    def finish(self, prepared: Prepared) -> Prepared:
        """This form from codes that were gathered, or from the values that serve both forms."""
        if isinstance(prepared, Quantized) and self.decode is not None:
            prepared = self.decode(prepared)
        if self.transposed:
            assert isinstance(prepared, Decoded)
            return Decoded(prepared.values.T, prepared.scale)
        return prepared


class PreparedWeights:
    """The prepared forms of one weight [N, K] in one step.

    Args:
        keep: whether forms are kept for later calls of the step; else each call makes its own, from the same amax and
            random bits.
    """

    __slots__ = ("__weakref__", "_amax", "_amaxes", "_entered", "_forms", "_keep", "_of", "_position", "_version")

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep
        self._position: tuple[int, int] | None = None
        self._of: weakref.ref[Tensor] | None = None
        self._version = 0
        self._forms: list[tuple[tuple[object, ...], Prepared]] = []
        self._amax: Tensor | None = None
        self._amaxes: dict[tuple[object, ...], Tensor] = {}
        self._entered = False

    def __reduce__(self) -> tuple[type[PreparedWeights], tuple[bool]]:
        """Copies and pickles start empty: the forms belong to the original tensor."""
        return PreparedWeights, (self._keep,)

    def form(self, w_NK: Tensor, form: WeightForm, call: Call) -> Prepared:
        """The weight in the given form, cached within a step."""
        rounded = None
        if isinstance(w_NK, Gathered):
            sent = w_NK.source.form(form, call)
            if sent is not None:
                return sent
            if form.spec is not None and form.spec.requantises is not None and form.operand == DGRAD_W:
                rounded = w_NK.source.rounded(form.spec.requantises, call)
            w_NK = w_NK.source.values(w_NK.dtype) if rounded is None else rounded
        own = w_NK if call.parameter is None else call.parameter
        if (call.seed, call.step) != self._position:
            self._begin(call)
        version = 0 if own.is_inference() else own._version
        known = None if self._of is None else self._of()
        if known is not own or version != self._version:
            if known is None or version != self._version or own is not w_NK or not known.is_set_to(own):
                self._forms.clear()
                self._amaxes.clear()
                self._amax = None
            forms = self._forms
            self._of, self._version = weakref.ref(own, lambda _: forms.clear()), version
        amax = None
        if form.spec is not None and form.spec.delayed is not None:
            amax = self.delayed_amax(w_NK, form.spec, call)
        prepared = None
        for key, found in self._forms:
            if key == form.key:
                prepared = found
                break
        if prepared is None:
            prepared = self._prepare(w_NK.detach(), form, call, amax, rounded is not None)
            if self._keep:
                self._forms.append((form.key, prepared))
        if form.transposed:
            assert isinstance(prepared, Decoded)
            return Decoded(prepared.values.T, prepared.scale)
        return prepared

    def _begin(self, call: Call) -> None:
        """Forget what belongs to another step than that of `call`."""
        self._position = (call.seed, call.step)
        self._forms.clear()
        self._amaxes.clear()
        self._amax, self._entered = None, False

    def _prepare(
        self, w_NK: Tensor, form: WeightForm, call: Call, amax: Tensor | None, rounded: bool = False
    ) -> Prepared:
        """`rounded`: w is what `form.spec.requantises` gave."""
        spec = form.spec
        w = w_NK.T if form.operand == DGRAD_W else w_NK
        if spec is None:  # high precision uses the recipe's dtype; otherwise the master weight is quantised
            return Decoded(w.to(form.dtype), None)
        key = call.weight_key(form.operand, form.start) if spec.random else None
        if form.before and spec.requantises is not None and not rounded:
            w = requantised(w, spec, self._amax_over_ranks(w.T, spec.requantises, form.before, form.operand))
        if form.holders:
            amax = self._amax_over_ranks(w, spec, form.holders, form.operand, key)
        return (form.requantise if rounded else form.make)(w, key, amax)

    def _amax_over_ranks(
        self, w: Tensor, spec: QuantSpec, holders: tuple[Ranks, ...], operand: int, key: RandomKey | None = None
    ) -> Tensor:
        """The amax of the whole weight: one collective per step, whichever forms are made and made again."""
        whole = amax_extent(spec) == "tensor" and spec.hadamard is None and spec.requantises is None
        known = ("tensor",) if whole else (spec, operand)
        if known not in self._amaxes:
            self._amaxes[known] = amax_over(holders, w, spec, key)
        return self._amaxes[known]

    def delayed_amax(self, w_NK: Tensor, spec: QuantSpec, call: Call) -> Tensor:
        """The weight's delayed amax; its own enters the history once per step, at its first call in training.

        Args:
            w_NK: the weight, or its amax (0-d).
        """
        if (call.seed, call.step) != self._position:
            self._begin(call)
        if self._amax is None or (call.training and not self._entered):
            enter, position = call.training and not self._entered, (call.seed, call.step)
            self._amax = call.scaling.amax("w", spec, w_NK.detach(), enter=enter, position=position)
            self._entered = self._entered or call.training
        return self._amax
