"""Weights prepared once per call, or once for all calls of passes in which they do not change
(`precision.settings.ConstantWeights`), not once per GEMM.

The prepared form of a weight is a function of the weight, of the spec and, under stochastic
rounding, of seed and step. For square blocks the column-wise form is the transpose of the row-wise
form, a view. Where a weight is gathered for the time of a call only (`nn.gathered`), no form is
kept: those of all layers would be a whole model on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.gathered import Gathered
from fp4train.nn.measured_amaxes import MeasuredAmaxes
from fp4train.nn.ranks import Ranks, amax_over
from fp4train.nn.weight_form import FormKey, PairedForm, WeightForm
from fp4train.quantize import (
    Decoded,
    Quantized,
    Quantizer,
    RandomKey,
    has_tensor_amax,
    measure_amax,
    requantised,
    to_torch,
)
from fp4train.quantize.quantized import turned
from fp4train.quantize.source import Codes


class EarlierAmax(NamedTuple):
    """The amax of earlier steps that scales a weight, where its spec takes one.

    history_entry: the newest entry of the amax history, which a kernel makes the larger of itself
        and the weight's own amax; None: none does.
    """

    amax: Tensor | None = None
    history_entry: Tensor | None = None


MEASURED = EarlierAmax()
"""Of a spec whose amax is measured in each step."""


class PreparedWeights:
    """The prepared forms of one weight [N, K] while it does not change.

    Args:
        keep: whether forms are kept; else each GEMM makes its own, from the same amax and random
            bits.
        measured: the amaxes of the model's weights; None: each is measured by itself.
    """

    def __init__(self, keep: bool = True, measured: MeasuredAmaxes | None = None) -> None:
        self.keep = keep
        self.measured = measured
        self._parts: dict[Hashable, PreparedWeights] = {}
        self._forms: list[tuple[FormKey, Prepared]] = []
        self._amax: Tensor | None = None
        self._amaxes: dict[object, Tensor] = {}
        self._entered = False

    def part(self, key: Hashable) -> PreparedWeights:
        """Those of a part of the weight, or of one weight of a group."""
        return self._parts.setdefault(key, PreparedWeights(self.keep))

    def prepared(
        self,
        w_NK: Tensor,
        form: WeightForm,
        call: LayerCall,
        group_amax: Tensor | None = None,
        is_rounded: bool = False,
        other: Tensor | None = None,
    ) -> Prepared:
        """The weight in the given form, made where it is not kept.

        Args:
            group_amax: the amax that fused weights share; None: it is measured here where
                `form.fused` names them.
            is_rounded: whether w is what `form.spec.requantises` gave.
            other: the scale of the operand that it is multiplied with, 0-d; None: it has none, or
                its factor is made with the product.
        """
        if isinstance(w_NK, Gathered):
            return self._of_gathered(w_NK, form, call)
        prepared = None
        for key, kept_form in self._forms:
            if key == form.key:
                prepared = kept_form
                break
        pair = None
        if prepared is None and self.keep and call.gradients.x is not None:
            pair = form.pair
        earlier = MEASURED
        if form.earlier_amax:
            earlier = self._earlier_amax(w_NK, form, call, pair)
        if prepared is None:
            prepared = self._prepare(w_NK, form, call, earlier, group_amax, is_rounded, pair, other)
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
        group_amax = source.fused_amax(call) if form.fused else None
        values = None
        rounded_codes = form.operand.of
        if rounded_codes is not None and form.of_transpose:
            values = source.rounded(rounded_codes, call)
        if values is not None:
            return self.prepared(values, form, call, group_amax, is_rounded=True)
        return self.prepared(source.values(w_NK.dtype), form, call, group_amax)

    def _prepare(
        self,
        w_NK: Tensor,
        form: WeightForm,
        call: LayerCall,
        earlier: EarlierAmax,
        group_amax: Tensor | None,
        is_rounded: bool,
        pair: PairedForm | None,
        other: Tensor | None,
    ) -> Prepared:
        """The weight in the given form; `group_amax`, `is_rounded` and `other` as for `prepared`.

        Args:
            pair: maker of the transposed form with it, for backward.
        """
        w = w_NK.detach()
        if form.of_transpose:
            w = w.T
        for kept_key, kept_form in self._forms:
            if kept_key == form.turned_from and isinstance(kept_form, Quantized):
                return turned(kept_form)
            if kept_key == form.rounded_from and isinstance(kept_form, Decoded):
                w = kept_form.rounded().T
                is_rounded = True
        spec = form.spec
        # high precision uses the recipe's dtype; otherwise the master weight is quantised
        if spec is None:
            return Decoded(w.to(form.dtype), None)
        if form.fused and group_amax is None and not is_rounded:
            group_amax = self._group_amax(call.fused.of(form.fused, call.member), form)
        rounds_first = form.rounds_first
        if group_amax is not None and spec.requantises is not None:
            rounds_first = True
        if rounds_first and not is_rounded:
            w = requantised(w, spec, self._rounding_amax(w, form, group_amax))
            is_rounded = True
        key = None
        if spec.random:
            key = call.position.key(call.layer_key, form.number, *form.start)
        amax = earlier.amax
        if group_amax is not None and not is_rounded:
            amax = group_amax
        elif form.amax_ranks and amax is None:
            assert form.operand.codes is not None
            amax = self._amax_over_ranks(w, form.operand.codes, form.amax_ranks, key)
        elif amax is None and form.measured and self.measured is not None and self.keep:
            amax = self.measured.amax(w_NK, call.constant)
        if pair is not None:
            prepared, turned_form = pair.quantizer(w, None, amax, None, amax, earlier.history_entry)
            self._forms.append((pair.key, turned_form))
            return prepared
        if other is not None and form.writes_factors:
            return form.make(w, key, amax, other)
        return (form.make_of_rounded if is_rounded else form.make)(w, key, amax)

    def _rounding_amax(self, w: Tensor, form: WeightForm, group_amax: Tensor | None) -> Tensor:
        """The amax of what is requantised: that of a group, or of all ranks that have a part."""
        if group_amax is not None:
            return group_amax
        rounded_codes = form.operand.of
        assert rounded_codes is not None
        return self._amax_over_ranks(w.T, rounded_codes, form.rounding_ranks)

    def _amax_over_ranks(
        self,
        w: Tensor,
        codes: Codes,
        amax_ranks: tuple[Ranks, ...],
        key: RandomKey | None = None,
    ) -> Tensor:
        """The amax of the whole weight: one collective, whichever forms are made and made again."""
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

    def _earlier_amax(
        self, w_NK: Tensor, form: WeightForm, call: LayerCall, pair: PairedForm | None
    ) -> EarlierAmax:
        """The amax of earlier steps that scales a form, also where the form is kept: the weight's
        own enters the history once.
        """
        if self._amax is not None and self._entered:
            return EarlierAmax(self._amax)
        joins = pair is not None and pair.quantizer.joins
        return EarlierAmax(
            *self.delayed_amax(
                w_NK, form.quantizer, call, kernel_enters_amax=joins, ranks=form.amax_ranks
            )
        )

    def delayed_amax(
        self,
        w_NK: Tensor,
        quantizer: Quantizer,
        call: LayerCall,
        *,
        kernel_enters_amax: bool = False,
        ranks: Sequence[Ranks] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`DelayedScaling.amax` of the weight; its own enters the history at its first call in
        training.

        Args:
            w_NK: the weight, or its amax (0-d).
            kernel_enters_amax, ranks: see `DelayedScaling.amax`.
        """
        if (enter := call.training and not self._entered) or self._amax is None:
            assert call.scaling is not None
            amaxes = call.scaling.amax(
                "w",
                quantizer,
                w_NK,
                enter=enter,
                step=call.position.step,
                kernel_enters_amax=kernel_enters_amax,
                ranks=ranks,
            )
            self._amax = amaxes[0]
            self._entered = self._entered or enter
            return amaxes
        return self._amax, None
