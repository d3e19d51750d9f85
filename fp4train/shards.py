"""A rank's shard of a tensor: a box of it, with the box's place in the whole.

A plain tensor is the case of one box at offset 0. Of a DTensor (torch.distributed.tensor) a rank
holds the box that the tensor's mesh and placements give it; ranks along a mesh dimension with
`Replicate` hold the same one.

A weight whose rows are several segments (q, k and v in one) may be cut in each of them: then a
DTensor holds the rows in another order (`RowOrder`), and what a rank holds is several runs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


Runs = tuple[tuple[int, int], ...]
"""(first row, number of rows) of rows that follow each other, one run after another."""


@dataclass(frozen=True)
class RowOrder:
    """The order of rows in a DTensor whose segments are each cut over ranks: of each rank its part
    of each segment.

    Args:
        segments: rows of each segment; the ranks divide each.
        ranks: their number.
    """

    segments: tuple[int, ...]
    ranks: int

    def runs(self, begin: int, count: int) -> Runs:
        """The runs of rows in the tensor that are `count` rows of the DTensor, from `begin` on."""
        starts = list(accumulate(self.segments, initial=0))
        runs: list[tuple[int, int]] = []
        at = 0  # of a rank's part of a segment in the DTensor
        for rank in range(self.ranks):
            for start, size in zip(starts, self.segments, strict=False):
                part = size // self.ranks
                low = max(begin, at)
                high = min(begin + count, at + part)
                if low < high:
                    row = start + rank * part + low - at
                    if runs and sum(runs[-1]) == row:
                        row, length = runs.pop()
                        low -= length
                    runs.append((row, high - low))
                at += part
        return tuple(runs)


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """A box of a tensor, or some runs of its rows.

    Args:
        shape: shape of the whole tensor.
        offsets: first index of the box in each dimension.
        tensor: the box itself; its shape is the box's sizes.
        runs: runs of rows, where the rows of the box do not follow each other; `offsets` then begin
            with the first row of the first run.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    runs: Runs = ()

    def __post_init__(self) -> None:
        if self.runs:
            if sum(count for _, count in self.runs) != self.tensor.shape[0]:
                raise ValueError(
                    f"{self.runs} are not the rows of a part of shape {list(self.tensor.shape)}"
                )
            list(self.boxes())  # a box checks itself
        elif self.tensor.shape != self.shape or self.offsets != (0,) * len(self.shape):
            check_lies_in("a part of shape", tuple(self.tensor.shape), self.offsets, self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.tensor.shape == self.shape and not self.runs

    def boxes(self) -> Iterator[TensorShard]:
        """The boxes that it consists of, with which it shares memory."""
        at = 0
        for row, count in self.runs:
            part = self.tensor.narrow(0, at, count)
            yield TensorShard(shape=self.shape, offsets=(row, *self.offsets[1:]), tensor=part)
            at += count
        if not self.runs:
            yield self


def check_lies_in(
    what: str, sizes: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Raise ValueError where a box of `sizes` at `offsets` does not lie in a tensor of `shape`;
    `what` begins the message.
    """
    if not len(shape) == len(offsets) == len(sizes) or not all(
        offset >= 0 and offset + size <= full
        for offset, size, full in zip(offsets, sizes, shape, strict=True)
    ):
        raise ValueError(
            f"{what} {list(sizes)} at {list(offsets)} does not lie in a tensor of {list(shape)}"
        )


def shard_of(tensor: Tensor, order: RowOrder | None = None) -> TensorShard:
    """This rank's shard of `tensor`, with which it shares memory.

    Args:
        order: order of the rows of a DTensor; None: that of the tensor.

    Raises:
        TypeError: a DTensor with values that are still to be summed over ranks, or whose box is not
            known.
    """
    if not is_sharded(tensor):
        return TensorShard(
            shape=tuple(tensor.shape), offsets=(0,) * tensor.dim(), tensor=tensor.detach()
        )
    dtensor: Any = tensor.detach()
    if any(placement.is_partial() for placement in dtensor.placements):
        raise TypeError(
            f"{dtensor.placements}: its values are still to be summed over ranks; redistribute "
            "it first"
        )
    (chunk,) = dtensor.__create_chunk_list__()
    box = dtensor.to_local()
    if box.numel() == 0:  # torch places an empty box anywhere
        return TensorShard(shape=tuple(dtensor.shape), offsets=(0,) * dtensor.dim(), tensor=box)
    if tuple(box.shape) != tuple(chunk.sizes):
        raise TypeError(
            f"a DTensor of {list(dtensor.shape)} over {dtensor.placements}: its parts are no boxes"
        )
    shard = TensorShard(shape=tuple(dtensor.shape), offsets=tuple(chunk.offsets), tensor=box)
    if order is None:
        return shard
    runs = order.runs(shard.offsets[0], box.shape[0])
    offsets = (runs[0][0], *shard.offsets[1:])
    if len(runs) == 1:
        return replace(shard, offsets=offsets)
    return replace(shard, offsets=offsets, runs=runs)


def local(tensor: Tensor) -> Tensor:
    """The values of `tensor` on this rank, without a collective."""
    if type(tensor) in _PLAIN:
        return tensor.detach()
    return shard_of(tensor).tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """`part`, which this rank holds, as a tensor of the shape, mesh and placements of `tensor`."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    dtensor: Any = tensor
    sharded: Tensor = DTensor.from_local(
        part,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
    return sharded


def owned(
    tensors: Mapping[str, Tensor], *, leads: bool, orders: Mapping[str, RowOrder] | None = None
) -> dict[str, TensorShard]:
    """The shards of `tensors` that this rank writes, so that all ranks together write each element
    once; no collective.

    A part that several ranks hold is written by one of them, so chosen that they write about as
    many bytes each.

    Args:
        leads: whether this rank writes the plain tensors, which all ranks hold alike.
        orders: orders of rows other than the tensor's, by the name of a DTensor or of what it is
            in.

    Returns:
        The parts by name; names of one tensor (tied weights) have one part.
    """
    shards = {
        name: shard_of(tensor, order_of(name, tensor, orders or {}))
        for name, tensor in tensors.items()
    }
    unique, aliases = separate({name: part.tensor for name, part in shards.items()})
    written: dict[str, TensorShard] = {}
    loads: dict[tuple[object, ...], list[int]] = {}
    for name in unique:
        part = shards[name]
        tensor = tensors[name]
        if is_sharded(tensor):
            index, count, kind = _replica(tensor)
            load = loads.setdefault(kind, [0] * count)
            chosen = load.index(min(load))
            load[chosen] += part.tensor.nbytes
            writes = index == chosen
        else:
            writes = leads
        if writes and (part.tensor.numel() or not math.prod(part.shape)):
            written[name] = part
    return written | {
        name: written[target] for name, target in aliases.items() if target in written
    }


def row_orders(model: nn.Module) -> Mapping[str, RowOrder]:
    """The parameters of `model`, by name, that hold their rows in another order: cut in segments
    (`parallel/tensor.py`)."""
    orders: Mapping[str, RowOrder] = getattr(model, "row_orders", {})
    return orders


def order_of(name: str, tensor: Tensor, orders: Mapping[str, RowOrder]) -> RowOrder | None:
    """The order of rows of the tensor of a name like `model/weight` or `optimizer/state/3/moment`;
    None: its own.
    """
    order = orders.get(name) or orders.get(name.rpartition("/")[0])
    if order is not None and tensor.dim() and tensor.shape[0] == sum(order.segments):
        return order
    return None


def _replica(tensor: Any) -> tuple[int, int, tuple[object, ...]]:
    """(index of this rank among those that hold the same part, their number, a key of their
    group).
    """
    mesh = tensor.device_mesh
    dimensions = tuple(
        i for i, placement in enumerate(tensor.placements) if placement.is_replicate()
    )
    index = 0
    count = 1
    for dimension in dimensions:
        index = index * mesh.size(dimension) + mesh.get_local_rank(dimension)
        count *= mesh.size(dimension)
    return index, count, (mesh, dimensions)


def separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that are another one (tied weights), and the names of these with what
    they stand for.
    """
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if tensor.numel() and tensor.device != torch.device("meta"):
            place = (
                tensor.device,
                tensor.data_ptr(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
            )
            if names.setdefault(place, name) != name:
                aliases[name] = names[place]
                continue
        stored[name] = tensor
    return stored, aliases
