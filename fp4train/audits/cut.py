"""A call of a layer that tensor parallelism cuts: what the other ranks have of it.

Each rank multiplies its part of the features. By the plan its codes are those of the whole layer's
operands, so scales that cover a whole operand cover the parts of all ranks, and random bits count
from its first element. Of the GEMM that contracts the cut features each rank has a term,

    y = Σ_r y_r + bias  ("in"; of "out" dx = Σ_r dx_r)        in float32, rounded once

in an order that the library chooses: y lies between Σ ∓ e, both rounded, with e = R·2⁻²⁴·Σ|y_r|.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp4train.audits.bits import where_differing
from fp4train.audits.fault import CallFinding
from fp4train.quantize import Operand, QuantSpec, RandomKey, amax_extent, reference
from fp4train.quantize.source import AXES
from fp4train.shards import Runs

_ULP: Final = 2.0**-24


@dataclass(frozen=True)
class CutCall:
    """What all ranks together have of one call.

    Args:
        along: features that are cut, "out" or "in".
        rank, ranks: place of this rank, and their number.
        sequence: whether tokens are cut between layers: of a sum each rank takes its own.
        runs: (first, number) of this rank's out features in the whole layer's, where they do not
            follow each other; empty: they do.
        tensors: x, w and dy of the whole layer, those that are cut; parts of ranks in turn.
        rows: indices of the rows whose terms were gathered, among all tokens.
        terms: terms of the GEMM that is summed, float32 [ranks, rows, columns]; None: it did not
            run.
    """

    along: str
    rank: int
    ranks: int
    sequence: bool
    runs: Runs
    tensors: Mapping[str, Tensor]
    rows: Tensor
    terms: Tensor | None

    @property
    def summed(self) -> str:
        """The GEMM of which each rank has a term."""
        return "dgrad" if self.along == "out" else "fprop"

    def runs_of(self, operand: Operand) -> Runs:
        """The runs of an operand's features that take their random bits each from its own place."""
        spec = operand.spec
        if spec is not None and spec.random and operand.has("out"):
            return self.runs
        return ()

    def whole(self, operand: Operand, dtype: torch.dtype) -> Tensor | None:
        """The whole layer's tensor in the orientation that is multiplied; None: it is not cut."""
        tensor = self.tensors.get(operand.tensor)
        if tensor is None or not operand.has(self.along):
            return None
        if operand.tensor != "w":
            tensor = tensor.to(dtype)
        return tensor.T if operand.transposed else tensor

    def amaxes(self, operand: Operand, dtype: torch.dtype, key: RandomKey | None) -> Amaxes:
        """The amaxes of an operand over all ranks."""
        spec = operand.spec
        tensor = self.whole(operand, dtype)
        if spec is None or tensor is None:
            return Amaxes()
        inner = measured_inner(tensor, spec)
        return self.of_rank(operand, Amaxes(measured_outer(tensor, spec, key, inner), inner))

    def of_rank(self, operand: Operand, amaxes: Amaxes) -> Amaxes:
        """The amaxes of this rank's part, of those of the whole operand."""
        cut_rows = AXES[operand.tensor][int(operand.transposed)] == self.along
        return Amaxes(
            self._of_rows(amaxes.operand) if cut_rows else amaxes.operand,
            amaxes.inner if cut_rows else self._of_rows(amaxes.inner),
        )

    def _of_rows(self, amax: Tensor | None) -> Tensor | None:
        """The amaxes of this rank's rows, of one per row."""
        if amax is None or amax.numel() == 1:
            return amax
        return amax.tensor_split(self.ranks)[self.rank]

    def findings(
        self, result: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Iterator[CallFinding]:
        """What differs between y or dx of this rank and the sum of the terms, rounded to `dtype`."""
        if self.terms is None:
            return
        rows = self.rows
        terms = self.terms
        if self.sequence:
            start = self.rank * len(result)
            of_rank = (rows >= start) & (rows < start + len(result))
            rows = rows[of_rank] - start
            terms = terms[:, of_rank]
        value = result[rows]
        where = torch.zeros(result.shape, dtype=torch.bool)
        where[rows] = _beyond(value, terms, bias, dtype)
        apart = where_differing(where)
        if apart is not None:
            what = "the layer returns something else than the sum of the terms of all ranks"
            yield CallFinding(what, apart)


def _beyond(value: Tensor, terms: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The elements that no order of the sum gives, bool [rows, columns]."""
    total = terms.double().sum(0)
    error = len(terms) * _ULP * terms.double().abs().sum(0)
    if bias is not None:
        rounded = bias.to(dtype).double()
        total = total + rounded
        error = error + _ULP * (total.abs() + rounded.abs())
    low = (total - error).float().to(dtype).to(value.dtype)
    high = (total + error).float().to(dtype).to(value.dtype)
    outside = (value < low) | (value > high) | value.isnan()
    overflows = ~(low.isfinite() & high.isfinite())
    never_finite = ~(low.isfinite() | high.isfinite())
    return torch.where(overflows, never_finite & value.isfinite(), outside)


class Amaxes(NamedTuple):
    """The amaxes that scale an operand, and what it requantises; None: their own."""

    operand: Tensor | None = None
    inner: Tensor | None = None


def measured(tensor: Tensor, spec: QuantSpec, key: RandomKey | None = None) -> Tensor | None:
    """The amax that scales a tensor, 0-d or one per row; None: its scales are those of blocks."""
    if amax_extent(spec) is None:
        return None
    return reference.scale_tensor(tensor, spec, None, key).amax


def measured_inner(tensor: Tensor, spec: QuantSpec) -> Tensor | None:
    """The amax that scales what `spec` requantises; None: there is none."""
    return None if spec.requantises is None else measured(tensor.T, spec.requantises)


def measured_outer(
    tensor: Tensor, spec: QuantSpec, key: RandomKey | None, inner: Tensor | None
) -> Tensor | None:
    """`measured` of what `spec` makes of a tensor before it quantises.

    Args:
        inner: amax of what it requantises; None: that of the tensor.
    """
    if inner is not None and spec.requantises is not None:
        rounded = reference.quantize(tensor.T, spec.requantises, amax=inner)
        tensor = rounded.restore(torch.bfloat16).T
        spec = replace(spec, requantises=None)
    return measured(tensor, spec, key)
