"""What ranks send each other of a gathered weight: items of codes and scales, or of values, made of
a shard, and the forms that a layer takes of what arrived.

The column-wise form of a weight, blocked along its rows, is quantised from the transposed shard,
and sent transposed back: every tensor that is sent has the shards along its first dimension.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.weight_form import WeightForm
from fp4train.quantize import Decoded, Own, Quantized, QuantSpec, quantizer
from fp4train.quantize.quantized import turned
from fp4train.quantize.sharded import divided_tensors


class GatherItem(NamedTuple):
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


class SentTensors(NamedTuple):
    """The tensors that one rank sends for a `GatherItem`, and the quantised shard of which they
    are; None: of values.
    """

    tensors: tuple[Tensor, ...]
    shard: Quantized | None = None


MASTER = GatherItem(None, dtype=torch.float32)


def codes_of_shard(shard: Tensor, item: GatherItem, amax: Tensor | None) -> SentTensors:
    """The codes of a shard of a weight [N, K].

    Args:
        amax: that of the whole weight, where the codes depend on it.
    """
    spec = item.spec
    assert spec is not None
    w = shard.T if item.column else shard
    quantised = quantizer(spec, w.device.type).codes(w, None, amax)
    if spec.has_outer_scale:  # the scales have all that the amax says
        quantised = quantised._replace(amax=None)
    tensors = divided_tensors(quantised, columns=item.column)
    # holds its codes once
    return SentTensors(tensors, quantised._replace(codes=tensors[0]))


def codes_of_group(shard: Tensor, item: GatherItem) -> SentTensors:
    """The codes of this rank's weights [E, N, K] of a group, which are whole: codes, scales and
    amaxes, one after the other.
    """
    spec = item.spec
    assert spec is not None
    make = quantizer(spec, shard.device.type).codes
    members = [make(w_NK.T if item.column else w_NK, None, None) for w_NK in shard]
    if spec.has_outer_scale:
        members = [member._replace(amax=None) for member in members]
    members = [member._replace(factor=None) for member in members]
    columns = [[part for part in member[2:] if part is not None] for member in members]
    tensors = tuple(torch.stack(parts) for parts in zip(*columns, strict=True))
    return SentTensors(tensors, members[0]._replace(codes=tensors[0][0], scales=tensors[1][0]))


class ReceivedWeight(ABC):
    """A gathered weight [N, K], of a `nn.gathered.GatheredSource`, in the forms that a layer takes."""

    @abstractmethod
    def codes(self, item: GatherItem, call: LayerCall) -> Quantized | None:
        """The quantised weight, if it came in the passes of the call."""

    @abstractmethod
    def values(self, dtype: torch.dtype) -> Tensor:
        """See `nn.gathered.GatheredSource`."""

    def prepared(self, form: WeightForm, call: LayerCall) -> Prepared | None:
        """See `nn.gathered.GatheredSource`."""
        if form.spec is None:  # a layer in high precision takes values
            return form.view_for_gemm(Decoded(self.values(form.dtype), None))
        codes = form.operand.shared
        if codes is None or codes.of is not None:
            return None
        item = GatherItem(codes.sent)
        arrived = self.codes(item, call)
        if arrived is None:
            return None
        if form.of_transpose and not item.column:
            arrived = turned(arrived)
        return form.view_for_gemm(arrived)

    def rounded(self, codes: Own, call: LayerCall) -> Tensor | None:
        """See `nn.gathered.GatheredSource`."""
        arrived = self.codes(GatherItem(codes), call)
        if arrived is None:
            return None
        return quantizer(arrived.spec, arrived.codes.device.type).decode(arrived).rounded()
