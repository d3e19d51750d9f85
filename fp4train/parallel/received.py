"""Payloads of gathered weights: the codes or values that ranks send each other, and the forms that
layers take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import Call
from fp4train.nn.weight_form import WeightForm
from fp4train.quantize import Decoded, Own, Quantized, QuantSpec, quantizer
from fp4train.quantize.quantized import turned

if TYPE_CHECKING:
    from fp4train.parallel.gather import WeightGather


class Payload(NamedTuple):
    """A form of a weight that is sent: codes and scales, or values.

    codes: the codes of the weight; those of wᵀ are sent transposed back. None: values are sent.
    dtype: the dtype of the values.
    """

    codes: Own | None
    dtype: torch.dtype | None = None

    @property
    def spec(self) -> QuantSpec | None:
        """How the weight is quantised."""
        return None if self.codes is None else self.codes.spec

    @property
    def column(self) -> bool:
        """Whether wᵀ is quantised."""
        return self.codes is not None and self.codes.axis == "out"


class Sent(NamedTuple):
    """The tensors that one rank sends of a payload, and the quantised shard of which they are;
    None: of values.
    """

    tensors: tuple[Tensor, ...]
    shard: Quantized | None = None


MASTER = Payload(None, dtype=torch.float32)


class MemberGather:
    """One weight [N, K] of a gathered group, as a `nn.gathered.GatheredSource`."""

    def __init__(self, group: WeightGather, index: int) -> None:
        self._group = group
        self._index = index
        self.rounds = group.rounds

    def form(self, form: WeightForm, call: Call) -> Prepared | None:
        """See `nn.gathered.GatheredSource`."""
        return form_of(self, form, call)

    def rounded(self, codes: Own, call: Call) -> Tensor | None:
        """See `nn.gathered.GatheredSource`."""
        return rounded_from(self.codes(Payload(codes), call))

    def codes(self, part: Payload, call: Call) -> Quantized | None:
        """The quantised weight, if it came in this step."""
        return self._group.codes_of(self._index, part, call)

    def fused_amax(self, call: Call) -> Tensor | None:
        """None: experts that share scales are sent as values."""
        return None

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `nn.gathered.GatheredSource`."""
        return self._group.arrived(dtype)[self._index].to(dtype)

    def master(self) -> Tensor:
        """See `nn.gathered.GatheredSource`."""
        return self._group.master()[self._index].clone()

    def member(self, index: int) -> NoReturn:
        """A weight has none."""
        raise TypeError(
            f"weight {self._index} of {self._group.layer.layer.name} is a matrix, without members"
        )


def form_of(source: WeightGather | MemberGather, form: WeightForm, call: Call) -> Prepared | None:
    """A gathered weight in a form, from its codes or from values that a layer in high precision
    takes.
    """
    if form.spec is None:
        return form.finish(Decoded(source.values(form.dtype), None))
    codes = form.operand.shared
    if not isinstance(codes, Own):
        return None
    part = Payload(codes)
    arrived = source.codes(part, call)
    if arrived is not None and form.of_transpose and not part.column:
        arrived = turned(arrived)
    if arrived is None:
        return None
    return form.finish(arrived)


def rounded_from(codes: Quantized | None) -> Tensor | None:
    """The values of codes in BF16."""
    if codes is None:
        return None
    return quantizer(codes.spec, codes.codes.device.type).decode(codes).rounded()
