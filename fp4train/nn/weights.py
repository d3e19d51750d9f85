"""Weights prepared once per optimizer step, not once per microbatch or GEMM.

The prepared form of a weight is a function of the weight, of the spec and, under stochastic
rounding, of seed and step. It is cached while the seed and step of the autocast context stay the
same. torch's version counter alone is not enough: the fused optimizers change weights without
incrementing it. For square blocks the column-wise form is the transpose of the row-wise form, a
view.

The cache belongs to one weight, to which it holds a weak reference, and is cleared with it. No
address is compared. Where a weight is gathered for the time of a call only (`nn.gathered`), no form
is kept: those of all layers would be a whole model on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.gathered import Gathered
from fp4train.nn.ranks import Ranks, amax_over
from fp4train.nn.weight_form import FormKey, PairedForm, WeightForm
from fp4train.quantize import (
    Decoded,
    Own,
    Quantized,
    Quantizer,
    RandomKey,
    Requantised,
    RunStep,
    has_tensor_amax,
    measure_amax,
    requantised,
    to_torch,
)
from fp4train.quantize.quantized import turned


class PreparedWeights:
    """The prepared forms of one weight [N, K] in one step.

    Args:
        keep: whether forms are kept for later calls of the step; else each call makes its own, from
            the same amax and random bits.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._parts: dict[Hashable, PreparedWeights] = {}
        self._step: RunStep | None = None
        self._of: weakref.ref[Tensor] | None = None
        self._version: tuple[int, ...] = ()
        self._forms: list[tuple[FormKey, Prepared]] = []
        self._amax: Tensor | None = None
        self._amaxes: dict[object, Tensor] = {}
        self._entered = False

    def __reduce__(self) -> tuple[type[PreparedWeights], tuple[bool]]:
        """Copies and pickles start empty: the forms belong to the original tensor."""
        return PreparedWeights, (self.keep,)

    def emptied(self) -> PreparedWeights:
        """The same without forms."""
        return PreparedWeights(self.keep)

    def part(self, key: Hashable) -> PreparedWeights:
        """Those of a part of the weight, or of one weight of a group."""
        return self._parts.setdefault(key, PreparedWeights(self.keep))

    def prepared(
        self,
        w_NK: Tensor,
        form: WeightForm,
        call: LayerCall,
        group: Tensor | None = None,
        rounded: bool = False,
    ) -> Prepared:
        """The weight in the given form, cached within a step.

        Args:
            group: the amax that fused weights share; None: it is measured here where `form.fused`
                names them.
            rounded: whether w is what `form.spec.requantises` gave.
        """
        if isinstance(w_NK, Gathered):
            return self._of_gathered(w_NK, form, call)
        parameter = w_NK if call.parameter is None else call.parameter
        if call.position.step != self._step:
            self._begin(call)
        fused = (
            call.fused.of(form.fused, call.member)
            if form.fused and group is None and not rounded
            else ()
        )
        version: tuple[int, ...] = ()
        # no comprehension, which is one more call of Python's
        for weight in (parameter, *fused):
            version += (0 if weight.is_inference() else weight._version,)
        seen = None if self._of is None else self._of()
        if seen is not parameter or version != self._version:
            same = type(seen) is type(parameter) and version == self._version and parameter is w_NK
            if seen is None or not same or not seen.is_set_to(parameter):
                self._forms.clear()
                self._amaxes.clear()
                self._amax = None
            forms = self._forms
            self._of = weakref.ref(parameter, lambda _: forms.clear())
            self._version = version
        if fused:
            group = self._group_amax(fused, form)
        prepared = None
        for key, kept_form in self._forms:
            if key == form.key:
                prepared = kept_form
                break
        pair = None
        if prepared is None and self.keep and call.gradients.x is not None:
            pair = form.pair
        amax = newest = None
        if form.earlier_amax:
            amax = self._amax
            if amax is None or not self._entered:
                later = pair is not None and pair.quantizer.joins
                amax, newest = self.delayed_amax(
                    w_NK, form.quantizer, call, later=later, over=form.amax_ranks
                )
        if prepared is None:
            prepared = self._prepare(w_NK.detach(), form, call, amax, group, rounded, pair, newest)
            if isinstance(prepared, Quantized) and form.tiles:
                prepared = to_torch(prepared)
            if self.keep:
                self._forms.append((form.key, prepared))
        if form.transposed:
            return form.view_for_gemm(prepared)
        return prepared

    def _of_gathered(self, w_NK: Gathered, form: WeightForm, call: LayerCall) -> Prepared:
        """A form of a gathered weight: from the codes that came, or as `prepared` makes it of the
        values that came.
        """
        source = w_NK.source
        if (sent := source.prepared(form, call)) is not None:
            return sent
        codes = form.operand.source
        group = source.fused_amax(call) if form.fused else None
        values = None
        if isinstance(codes, Requantised) and form.of_transpose:
            values = source.rounded(codes.of, call)
        if values is not None:
            return self.prepared(values, form, call, group, rounded=True)
        return self.prepared(source.values(w_NK.dtype), form, call, group)

    def _begin(self, call: LayerCall) -> None:
        """Forget what belongs to another step than that of `call`."""
        self._step = call.position.step
        self._forms.clear()
        self._amaxes.clear()
        self._amax = None
        self._entered = False

    def _prepare(
        self,
        w_NK: Tensor,
        form: WeightForm,
        call: LayerCall,
        amax: Tensor | None,
        group: Tensor | None,
        rounded: bool,
        pair: PairedForm | None,
        newest: Tensor | None,
    ) -> Prepared:
        """The weight in the given form; `group` and `rounded` as for `prepared`.

        Args:
            pair: maker of the transposed form with it, for backward; `newest` is its.
        """
        spec = form.spec
        w = w_NK.T if form.of_transpose else w_NK
        for kept_key, kept_form in self._forms:
            if kept_key == form.turned_from and isinstance(kept_form, Quantized):
                return turned(kept_form)
            if kept_key == form.rounded_from and isinstance(kept_form, Decoded):
                w = kept_form.rounded().T
                rounded = True
        # high precision uses the recipe's dtype; otherwise the master weight is quantised
        if spec is None:
            return Decoded(w.to(form.dtype), None)
        key = None
        if spec.random:
            key = call.position.key(call.layer_key, form.number, *form.start)
        source = form.operand.source
        rounds_first = form.rounds_first or (group is not None and spec.requantises is not None)
        if rounds_first and not rounded:
            if group is None:
                assert isinstance(source, Requantised)
                group = self._amax_over_ranks(w.T, source.of, form.rounding_ranks)
            w = requantised(w, spec, group)
            rounded = True
            group = None
        if group is not None and not rounded:
            amax = group
        elif form.amax_ranks and amax is None:
            assert isinstance(source, Own | Requantised)
            amax = self._amax_over_ranks(w, source, form.amax_ranks, key)
        if pair is not None:
            prepared, other = pair.quantizer(w, None, amax, None, amax, newest)
            self._forms.append((pair.key, other))
            return prepared
        return (form.make_of_rounded if rounded else form.make)(w, key, amax)

    def _amax_over_ranks(
        self,
        w: Tensor,
        codes: Own | Requantised,
        amax_ranks: tuple[Ranks, ...],
        key: RandomKey | None = None,
    ) -> Tensor:
        """The amax of the whole weight: one collective per step, whichever forms are made and made
        again.
        """
        kind = "tensor" if has_tensor_amax(codes.spec) else codes
        if kind not in self._amaxes:
            self._amaxes[kind] = amax_over(amax_ranks, w, codes.spec, key)
        return self._amaxes[kind]

    def _group_amax(self, weights: Sequence[Tensor], form: WeightForm) -> Tensor:
        """The largest amax of fused weights, whichever of their specs it is for: all take it of the
        tensor as it is.
        """
        if "fused" not in self._amaxes:
            assert form.spec is not None
            spec = form.spec
            ranks = form.amax_ranks
            if spec.requantises is not None:
                spec = spec.requantises
                ranks = form.rounding_ranks
            amax = torch.stack([measure_amax(weight, spec) for weight in weights]).amax()
            for rank_group in ranks:
                amax = rank_group.largest(amax)
            self._amaxes["fused"] = amax
        return self._amaxes["fused"]

    def delayed_amax(
        self,
        w_NK: Tensor,
        quantizer: Quantizer,
        call: LayerCall,
        *,
        later: bool = False,
        over: Sequence[Ranks] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`DelayedScaling.amax` of the weight; its own enters the history once per step, at its
        first call in training.

        Args:
            w_NK: the weight, or its amax (0-d).
            later, over: see `DelayedScaling.amax`.
        """
        if call.position.step != self._step:
            self._begin(call)
        if (enter := call.training and not self._entered) or self._amax is None:
            assert call.scaling is not None
            amaxes = call.scaling.amax(
                "w", quantizer, w_NK, enter=enter, step=call.position.step, later=later, over=over
            )
            self._amax = amaxes[0]
            self._entered = self._entered or enter
            return amaxes
        return self._amax, None
