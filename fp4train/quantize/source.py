"""Where an operand of a GEMM comes from: what is quantised, by which spec, in blocks along which
axis.

The three GEMMs of a layer contract three axes, along which their operands are blocked:

    fprop   y  = x·wᵀ     x [M, K],   w [N, K]      along the in features
    dgrad   dx = dy·w     dy [M, N],  wᵀ [K, N]     along the out features
    wgrad   dw = dyᵀ·x    dyᵀ [N, M], xᵀ [K, M]     along the tokens

x, w and dy lie in memory with their features last. Codes in blocks along the other axis are those
of the transposed tensor. What is cached, saved, sent or shared of an operand is known by its
source: two operands with one source have the same codes, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fp4train.quantize.quantized import Prepared
from fp4train.quantize.quantizer import tensor_of
from fp4train.quantize.random import DGRAD_DY, DGRAD_W, FPROP_W, FPROP_X, WGRAD_DY, WGRAD_X
from fp4train.quantize.sharded import packed_bytes, why_not_cut
from fp4train.quantize.spec import QuantSpec

Axis: TypeAlias = Literal["in", "out", "tokens"]

AXES: dict[str, tuple[Axis, Axis]] = {
    "x": ("tokens", "in"),
    "w": ("out", "in"),
    "dy": ("tokens", "out"),
}
"""Tensor → the axes of its rows and of its columns."""
CONTRACTED: dict[str, Axis] = {"fprop": "in", "dgrad": "out", "wgrad": "tokens"}
"""GEMM → the axis that it contracts."""
_RANDOM_OPERANDS: dict[tuple[str, str], int] = {
    ("x", "in"): FPROP_X,
    ("x", "tokens"): WGRAD_X,
    ("w", "in"): FPROP_W,
    ("w", "out"): DGRAD_W,
    ("dy", "out"): DGRAD_DY,
    ("dy", "tokens"): WGRAD_DY,
}
"""Tensor and axis → the number by which a random key knows the operand."""


@dataclass(frozen=True)
class Own:
    """The tensor itself, quantised by `spec` in blocks along `axis`."""

    spec: QuantSpec
    axis: Axis
    of: ClassVar[None] = None
    values: ClassVar[None] = None

    @property
    def codes(self) -> Own:
        return self

    @property
    def sent(self) -> Own:
        """The codes that other ranks send for it."""
        return self


@dataclass(frozen=True)
class Requantised:
    """The values of `of`, codes in blocks along the tensor's other axis, quantised by `spec` along
    `axis`.

    spec: with `requantises`, which is the spec of `of`.
    """

    spec: QuantSpec
    axis: Axis
    of: Own
    values: ClassVar[None] = None

    @property
    def codes(self) -> Requantised:
        return self

    @property
    def sent(self) -> Own:
        """The codes that other ranks send for it: those before."""
        return self.of


Codes: TypeAlias = Own | Requantised


@dataclass(frozen=True)
class ValuesOf:
    """The values of codes that fprop multiplies, in high precision, for a GEMM that contracts
    `axis`.
    """

    codes: Codes
    axis: Axis
    spec: ClassVar[None] = None

    def values(self, prepared: Prepared, dtype: torch.dtype) -> Tensor:
        """See `AnySource.values`."""
        return tensor_of(prepared, dtype)


@dataclass(frozen=True)
class High:
    """The tensor in high precision, for a GEMM that contracts `axis`."""

    axis: Axis
    spec: ClassVar[None] = None
    codes: ClassVar[None] = None
    values: ClassVar[None] = None


class AnySource(Protocol):
    """What each kind of source answers. Who prepares, multiplies, sends, counts or audits operands
    asks this, and no class. Another kind is a class here, with a hash (plans compare sources).
    """

    @property
    def axis(self) -> Axis:
        """The axis that the GEMM contracts."""

    @property
    def spec(self) -> QuantSpec | None:
        """How what the GEMM multiplies is quantised; None: it is in high precision."""

    @property
    def codes(self) -> Codes | None:
        """The codes that must be made, which themselves say `of` and `sent`; None: none."""

    @property
    def values(self) -> Callable[[Prepared, torch.dtype], Tensor] | None:
        """Function of the codes' form that gives what the GEMM multiplies, as the tensor lies;
        None: the GEMM multiplies the codes, or the tensor. The codes must be those that fprop
        multiplies (`Operand.check_values`).
        """


@dataclass(frozen=True)
class Operand:
    """An operand of a GEMM: the tensor, and where what is multiplied comes from."""

    tensor: str
    source: AnySource

    @property
    def axis(self) -> Axis:
        """The axis that the GEMM contracts, along which the operand is blocked."""
        return self.source.axis

    @property
    def spec(self) -> QuantSpec | None:
        """See `AnySource.spec`."""
        return self.source.spec

    @property
    def codes(self) -> Codes | None:
        """See `AnySource.codes`."""
        return self.source.codes

    @property
    def of(self) -> Own | None:
        """The codes whose values its codes are made of; None: of the tensor."""
        codes = self.codes
        return None if codes is None else codes.of

    @property
    def values(self) -> Callable[[Prepared, torch.dtype], Tensor] | None:
        """See `AnySource.values`."""
        return self.source.values

    @property
    def prepared_operand(self) -> Operand:
        """The operand whose form is prepared for it: that of the codes whose values it is, or
        itself.
        """
        if self.codes is None or self.values is None:
            return self
        return Operand(self.tensor, self.codes)

    def check_values(self, row_wise: Operand) -> None:
        """Refuse values of other codes than those of the form that is prepared for fprop.

        Raises:
            ValueError: names both.
        """
        if self.values is not None and self.prepared_operand != row_wise:
            raise ValueError(
                f"{self.tensor}: the GEMM that contracts {self.axis!r} takes the values of "
                f"{self.codes}, but what is multiplied before is {row_wise.source}: values are "
                "taken of these codes alone"
            )

    @property
    def shared(self) -> Codes | None:
        """The codes that serve it and others: of square blocks those of the tensor as it lies, for
        both its axes; else `codes`.
        """
        codes = self.codes
        if codes is None or not codes.spec.transposable:
            return codes
        return own(codes.spec, self.row_wise_axis)

    @property
    def sent(self) -> Own | None:
        """The codes that other ranks send for it; None: they send values."""
        codes = self.shared
        return None if codes is None else codes.sent

    @property
    def row_wise_axis(self) -> Axis:
        """The axis of the tensor's columns, which follow each other in memory."""
        return AXES[self.tensor][1]

    @property
    def transposed(self) -> bool:
        """Whether the GEMM takes the transposed tensor."""
        return self.axis != self.row_wise_axis

    @property
    def row_wise(self) -> Operand:
        """The operand, in high precision or square blocks, of the tensor as it lies: this one is a
        view of it.
        """
        if self.spec is None:
            return Operand(self.tensor, High(self.row_wise_axis))
        return Operand(self.tensor, own(self.spec, self.row_wise_axis))

    @property
    def random_operand(self) -> int:
        """The number by which a random key knows the operand."""
        return _RANDOM_OPERANDS[self.tensor, self.axis]

    def has(self, axis: str | None) -> bool:
        """Whether the tensor has this axis."""
        return axis in AXES[self.tensor]

    def why_not_cut(self, axis: str, extent: int) -> str | None:
        """Why parts of `extent` along an axis of the tensor are not whole blocks; None if they are,
        or have none.
        """
        codes = self.codes
        if codes is None:
            return None
        return why_not_cut(codes.spec, extent, columns=codes.axis == axis)

    def bytes(self, rows: int, columns: int, itemsize: int) -> float:
        """Bytes of its codes and scales, of a tensor [rows, columns] with `itemsize` bytes per
        value in high precision.
        """
        codes = self.codes
        if codes is None:
            return float(rows * columns * itemsize)
        return source_bytes(codes, self.tensor, rows, columns)


def source_bytes(codes: Codes, tensor: str, rows: int, columns: int) -> float:
    """Bytes of the codes and scales of a tensor [rows, columns]."""
    if codes.axis != AXES[tensor][1]:
        return packed_bytes(codes.spec, columns, rows)
    return packed_bytes(codes.spec, rows, columns)


@cache
def own(spec: QuantSpec, axis: Axis) -> Own:
    """The one `Own` of these: keys that hold it are compared by identity, at once."""
    return Own(spec, axis)


@cache
def operand(tensor: str, gemm: str, spec: QuantSpec | None) -> Operand:
    """The operand of `gemm` that a table quantises by `spec`; None: in high precision."""
    axis = CONTRACTED[gemm]
    if spec is None:
        return Operand(tensor, High(axis))
    if spec.requantises is None:
        return Operand(tensor, own(spec, axis))
    rows, columns = AXES[tensor]
    return Operand(
        tensor, Requantised(spec, axis, own(spec.requantises, columns if axis == rows else rows))
    )
