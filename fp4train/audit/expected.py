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

from fp4train.audit.call import ObservedCall
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import (
    Decoded,
    Delayed,
    Operand,
    Position,
    Quantized,
    QuantSpec,
    RandomKey,
    ValuesOf,
    has_tensor_amax,
    reference,
)
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax

UNALIGNED_TOKENS = 1 << 34
"""First column of tokens whose offset is not a multiple of 8."""


@dataclass(frozen=True)
class OperandSource:
    """The tensor that an operand is made of, and all that its codes depend on.

    Args:
        tensor: [R, C] in the orientation that is multiplied, in the dtype that is quantised.
        spec: how it is quantised; None: it is multiplied in `dtype`.
        key: key of its random bits; None: it takes none, or no position is known.
        amax: amax of a history, or of several weights; None: its own.
        dtype: dtype of the layer in high precision.
    """

    tensor: Tensor
    spec: QuantSpec | None
    key: RandomKey | None
    amax: Tensor | None
    dtype: torch.dtype

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
        tensor, amax = self.tensor, self.amax
        if spec.requantises is not None and amax is not None:
            inner = reference.quantize(tensor.T, spec.requantises, amax=amax)
            tensor, amax = inner.restore(torch.bfloat16).T, None
            spec = replace(spec, requantises=None)
        return reference.quantize(tensor, spec, key=self.key, amax=amax)

    def decoded(self) -> Decoded:
        """The values that are multiplied."""
        codes = self.quantized()
        if codes is None:
            return Decoded(self.tensor.to(self.dtype), None)
        return codes.decoded()


@dataclass(frozen=True)
class Expectation:
    """The plan and the position that a call should have had.

    Args:
        plan: the layer's plan in this step.
        position: position of its tokens; None: that of the call itself.
        weight: the weight that the optimizer holds; None: that of the call itself.
    """

    plan: LayerPlan
    position: Position | None = None
    weight: Tensor | None = None


def tensors(call: ObservedCall, expected: Expectation) -> dict[str, Tensor | None]:
    """x and dy in the dtype of the recipe and the weight as it is stored, by name."""
    dtype = expected.plan.table.torch_dtype
    return {
        "x": None if call.x is None else call.x.to(dtype),
        "w": call.w if expected.weight is None else expected.weight,
        "dy": None if call.dy is None else call.dy.to(dtype),
    }


def key_of(call: ObservedCall, operand: Operand, position: Position | None) -> RandomKey | None:
    """The key of the random bits of an operand; None: there is no position."""
    if position is None:
        return None
    row = column = 0
    token = position.token
    if operand.tensor != "w":
        if not operand.transposed:
            row = token
        elif token % 8 == 0:
            column = token
        else:
            column = UNALIGNED_TOKENS + token * 8
    if operand.tensor != "dy":
        row += call.first_feature if operand.transposed else 0
        column += 0 if operand.transposed else call.first_feature
    return RandomKey(
        seed=position.step.seed,
        step=position.step.number,
        layer=zlib.crc32(call.name.encode()),
        operand=operand.random_operand,
        row_offset=row,
        col_offset=column,
    )


def amax_of(call: ObservedCall, operand: Operand, plan: LayerPlan) -> Tensor | None:
    """The amax that scales an operand, where it is not its own."""
    spec = operand.spec
    assert spec is not None
    if spec.delayed is not None:
        name = operand.tensor
        if plan.layer.experts:
            name = f"{name}.{call.name.rpartition('.')[2]}"
        return delayed(call.scaling, name, spec, spec.delayed)
    if operand.tensor == "w" and call.fused and has_tensor_amax(spec.requantises or spec):
        return torch.stack([weight.abs().max().float() for weight in call.fused]).amax()
    return None


def delayed(scaling: dict[str, Tensor], name: str, spec: QuantSpec, settings: Delayed) -> Tensor:
    """The amax that a history gives in the coming step."""
    history = scaling.get(f"history.{name}")
    if history is None:
        return torch.tensor(initial_delayed_amax(spec))
    return delayed_amax(history[: settings.history], scaling[f"used.{name}"], settings)


def source_of(
    call: ObservedCall, expected: Expectation, gemm: str, tensor: str
) -> OperandSource | None:
    """The source of an operand; None: its tensor is not there."""
    plan = expected.plan
    operand = plan.sources[gemm, tensor]
    values = tensors(call, expected)[tensor]
    if values is None:
        return None
    dtype = plan.table.torch_dtype
    if isinstance(operand.source, ValuesOf):
        codes = source_of_operand(call, expected, Operand(tensor, operand.source.codes), values)
        values = codes.decoded().tensor(dtype)
        return OperandSource(values.T if operand.transposed else values, None, None, None, dtype)
    return source_of_operand(call, expected, operand, values)


def source_of_operand(
    call: ObservedCall, expected: Expectation, operand: Operand, values: Tensor
) -> OperandSource:
    """The source of an operand that is quantised, or in high precision, from its tensor as it
    lies.
    """
    plan = expected.plan
    dtype = plan.table.torch_dtype
    if operand.transposed:
        values = values.T
    spec = operand.spec
    if spec is None:
        return OperandSource(values, None, None, None, dtype)
    position = expected.position or call.position
    key = key_of(call, operand, position) if spec.random else None
    return OperandSource(values, spec, key, amax_of(call, operand, plan), dtype)
