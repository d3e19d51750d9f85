"""Between the parts that ranks hold and whole tensors, for checkpoints that one process can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fp4train.checkpoint import flatten, unflatten
from fp4train.parallel.world import World


def whole_state(state: Mapping[str, Any], world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a run as named whole tensors and plain data (`checkpoint.flatten`), on the lead.

    Every rank must call it with its own; those of the stages of a pipeline become one.
    """
    tensors, plain = flatten(state)
    tensors = whole(tensors, keep=world.lead or (world.stages > 1 and world.data_rank == 0))
    for stage in range(1, world.stages):
        rank = stage * world.data_ranks
        if world.place.rank == rank:
            _send(tensors, plain, world)
        elif world.lead:
            joined, other = unflatten(tensors, plain), unflatten(*_received(rank, world))
            for kept, added in (
                (joined["model"], other["model"]),
                (joined["optimizer"]["state"], other["optimizer"]["state"]),
                (joined["scaling"], other["scaling"]),
            ):
                kept.update(added)
            tensors, plain = flatten(joined)
    return tensors, plain


def _send(tensors: Mapping[str, Tensor], plain: Mapping[str, Any], world: World) -> None:
    described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    dist.send_object_list([described, plain], dst=0, group=world.control)
    for tensor in tensors.values():
        dist.send(tensor.detach().cpu().contiguous(), dst=0, group=world.control)


def _received(rank: int, world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    box: list[Any] = [None, None]
    dist.recv_object_list(box, src=rank, group=world.control)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in box[0].items()}
    for tensor in tensors.values():
        dist.recv(tensor, src=rank, group=world.control)
    return tensors, box[1]


def whole(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Each tensor whole, gathered one by one. Every rank must call it, with the same names in the same order.

    Args:
        keep: whether this rank needs them (the lead, which writes); else the result is empty.
    """
    kept: dict[str, Tensor] = {}
    seen: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            own, alike = tensor.to_local(), seen.setdefault(tuple(tensor.shape), [])
            # Tied weights are one tensor under two names, on every rank.
            full = next((full for each, full in alike if each.is_set_to(own)), None)
            if full is None:
                full = tensor.full_tensor()
                full = full.cpu() if keep else full.new_empty(0)
                alike.append((own, full))
            tensor = full
        if keep:
            kept[name] = tensor
    return kept


def part_like(own: Tensor, found: Tensor) -> Tensor:
    """The part of the whole tensor `found` that this rank holds of `own`; `found` itself where `own` is not cut.

    Nothing is sent: every rank has read the same checkpoint.
    """
    if not isinstance(own, DTensor):
        return found
    full = found.to(own.device)
    return distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None)
