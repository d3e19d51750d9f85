"""Operands as the plan says that they are, made by the readable reference (`quantize.reference`)
from the tensors of a call.

The random bits of an operand are keyed by (seed, step, layer, operand, place of its first element):
the layer by the checksum of its name, rows of x and dy by their token, in features by their place
behind those of other parts of the layer. Of operands along tokens the
columns are tokens; offsets that are not multiples of 8 lie in a range of their own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4train.audits.call import ObservedCall
from fp4train.audits.cut import Amaxes
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import (
    Decoded,
    Delayed,
    Operand,
    Position,
    Quantized,
    QuantSpec,
    RandomKey,
    has_tensor_amax,
    reference,
)
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax
from fp4train.quantize.sharded import stacked
from fp4train.quantize.source import AXES
from fp4train.shards import Runs

UNALIGNED_TOKENS = 1 << 34
"""First column of tokens whose offset is not a multiple of 8."""


@dataclass(frozen=True)
class OperandSource:
    """The tensor that an operand is made of, and all that its codes depend on.

    Args:
        tensor: [R, C] in the orientation that is multiplied, in the dtype that is quantised.
        spec: how it is quantised; None: it is multiplied in `dtype`.
        key: key of its random bits; None: it takes none, or no position is known.
        amax: amax of a history, of several weights or of all ranks; None: its own.
        dtype: dtype of the layer in high precision.
        inner_amax: that of what it requantises.
        runs: (first, number) of features that take their random bits each from its own place;
            empty: all follow the first.
        runs_in_rows: whether these are its rows, and not its columns.
    """

    tensor: Tensor
    spec: QuantSpec | None
    key: RandomKey | None
    amax: Tensor | None
    dtype: torch.dtype
    inner_amax: Tensor | None = None
    runs: Runs = ()
    runs_in_rows: bool = False

    @property
    def rounds_freely(self) -> bool:
        """Whether it is rounded by random bits that nobody knows: those of Transformer Engine."""
        spec = self.spec
        return spec is not None and spec.rounding == "stochastic" and self.key is None

    def quantized(self) -> Quantized | None:
        """Codes and scales, rounded to nearest where random bits are not known; None: it is not
        quantised.
        """
        spec = self.spec
        if spec is None:
            return None
        if self.rounds_freely:
            spec = replace(spec, rounding="nearest")
        tensor = self.tensor
        if self.inner_amax is not None and spec.requantises is not None:
            inner = reference.quantize(tensor.T, spec.requantises, amax=self.inner_amax)
            tensor = inner.restore(torch.bfloat16).T
            spec = replace(spec, requantises=None)
        if not self.runs or self.key is None:
            return reference.quantize(tensor, spec, key=self.key, amax=self.amax)
        return self._quantized_in_runs(tensor, spec, self.key)

    def _quantized_in_runs(self, tensor: Tensor, spec: QuantSpec, key: RandomKey) -> Quantized:
        amax = self.amax
        if amax is None:
            amax = reference.scale_tensor(tensor, spec, None, key).amax
        parts = []
        start = 0
        for begin, count in self.runs:
            part_amax = amax
            if self.runs_in_rows:
                at = key.replace(row_offset=begin)
                if amax is not None and amax.ndim == 2:
                    part_amax = amax[start : start + count]
            else:
                at = key.replace(col_offset=begin)
            part = tensor.narrow(0 if self.runs_in_rows else 1, start, count)
            parts.append(reference.quantize(part, spec, key=at, amax=part_amax))
            start += count
        return stacked(parts, columns=not self.runs_in_rows)

    def decoded(self) -> Decoded:
        """The values that are multiplied."""
        codes = self.quantized()
        if codes is None:
            return Decoded(self.tensor.to(self.dtype), None)
        return codes.decoded()


@dataclass(frozen=True)
class AuditedCall:
    """A call of a layer as it was observed, and what it should have been.

    Args:
        call: the record.
        planned: the layer's plan in this step; None: that which the executor ran.
        expected_position: position that its tokens should have; None: that of the call.
        weight: the weight that the optimizer holds; None: that of the call.
        previous: call of the same layer in the step before; None: it was not kept.
    """

    call: ObservedCall
    planned: LayerPlan | None = None
    expected_position: Position | None = None
    weight: Tensor | None = None
    previous: ObservedCall | None = None

    @property
    def plan(self) -> LayerPlan:
        return self.planned or self.call.plan

    @property
    def position(self) -> Position | None:
        """The position that should have keyed the random bits; None: nothing draws any."""
        return self.expected_position or self.call.position

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the recipe."""
        return self.plan.table.torch_dtype

    @property
    def earlier(self) -> AuditedCall | None:
        """The call of the step before under this plan; None: it was not kept."""
        if self.previous is None:
            return None
        return AuditedCall(self.previous, self.plan)

    def tensor(self, name: str) -> Tensor | None:
        """x or dy in the dtype of the recipe, or the weight as it is stored; None: it is not there."""
        if name == "w":
            if self.weight is None:
                return self.call.w
            return self.weight
        values = self.call.x if name == "x" else self.call.dy
        if values is None:
            return None
        return values.to(self.dtype)

    def takes_mean(self, gemm: str, name: str) -> bool:
        """Whether an operand is the codes of its tensor without the mean of its tokens."""
        return name in self.plan.recipe.centred and self.plan.sources[gemm, name].codes is not None

    def centred(self, gemm: str, name: str, values: Tensor) -> Tensor:
        """x, w or dy as its codes are made of it: without the mean that the layer took out."""
        if not self.takes_mean(gemm, name):
            return values
        mean = self.call.means.get(name)
        if mean is None:
            mean = values.sum(0, dtype=torch.float32) / max(len(values), 1)
        return (values.float() - mean).to(values.dtype)

    def source(self, gemm: str, name: str) -> OperandSource | None:
        """The source of an operand; None: its tensor is not there."""
        operand = self.plan.sources[gemm, name]
        values = self.tensor(name)
        if values is None:
            return None
        values = self.centred(gemm, name, values)
        if operand.values is None:
            return self._source_of(operand, values)
        codes = self._source_of(operand.prepared_operand, values)
        values = operand.values(codes.decoded(), self.dtype)
        if operand.transposed:
            values = values.T
        return OperandSource(values, None, None, None, self.dtype)

    def _source_of(self, operand: Operand, values: Tensor) -> OperandSource:
        """The source of an operand that is quantised, or in high precision, from its tensor as it
        lies.
        """
        if operand.transposed:
            values = values.T
        spec = operand.spec
        if spec is None:
            return OperandSource(values, None, None, None, self.dtype)
        key = self.key(operand) if spec.random else None
        amaxes = self._amaxes(operand, spec, key)
        return OperandSource(
            values,
            spec,
            key,
            amaxes.operand,
            self.dtype,
            amaxes.inner,
            runs=() if self.call.cut is None else self.call.cut.runs_of(operand),
            runs_in_rows=AXES[operand.tensor][int(operand.transposed)] == "out",
        )

    def key(self, operand: Operand) -> RandomKey | None:
        """The key of the random bits of an operand; None: there is no position."""
        position = self.position
        if position is None:
            return None
        call = self.call
        column = call.first_out if operand.tensor == "dy" else call.first_feature
        row = call.first_out if operand.tensor == "w" else position.token
        if operand.transposed:
            along = row if operand.tensor == "w" else _token_column(row)
            row = column
            column = along
        return RandomKey(
            seed=position.step.seed,
            step=position.step.number,
            layer=zlib.crc32(call.name.encode()),
            operand=operand.random_operand,
            row_offset=row,
            col_offset=column,
        )

    def _amaxes(self, operand: Operand, spec: QuantSpec, key: RandomKey | None) -> Amaxes:
        """The amaxes that scale an operand, where they are not its own."""
        call = self.call
        name = operand.tensor
        if self.plan.layer.experts:
            name = f"{name}.{call.name.rpartition('.')[2]}"
        if spec.delayed is not None:
            return Amaxes(_delayed(call.scaling, name, spec, spec.delayed))
        if spec.held is not None and self.position is not None:
            amax = _held_amax(call.scaling, name, spec.held, self.position.step.number)
            if amax is not None:
                return Amaxes(amax)
        if operand.tensor == "w" and call.fused and has_tensor_amax(spec.requantises or spec):
            amax = torch.stack([weight.abs().max().float() for weight in call.fused]).amax()
            if spec.requantises is None:
                return Amaxes(amax)
            return Amaxes(inner=amax)
        if call.cut is not None:
            return call.cut.amaxes(operand, self.dtype, key)
        return Amaxes()


def _token_column(token: int) -> int:
    """The column of random bits of a token, of operands along tokens."""
    if token % 8 == 0:
        return token
    return UNALIGNED_TOKENS + token * 8


def _delayed(scaling: dict[str, Tensor], name: str, spec: QuantSpec, settings: Delayed) -> Tensor:
    """The amax that a history gives in the coming step; without it, the one used last."""
    history = scaling.get(f"history.{name}")
    used = scaling.get(f"used.{name}")
    if used is None:
        return torch.tensor(initial_delayed_amax(spec))
    if history is None:
        return used
    return delayed_amax(history[: settings.history], used, settings)


def _held_amax(scaling: dict[str, Tensor], name: str, steps: int, number: int) -> Tensor | None:
    """The amax that is held in a step of this number, where amaxes are held for so many steps;
    None: this call, the first one of the step, measures it.
    """
    amax = scaling.get(f"held.amax.{name}")
    if amax is None:
        return None
    measured = int(scaling[f"held.step.{name}"])
    usable = bool((amax > 0) & amax.isfinite())
    if usable and measured <= number < measured + steps:
        return amax
    return None
