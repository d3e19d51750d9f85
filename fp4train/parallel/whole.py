"""Between the parts that ranks hold and whole tensors, for checkpoints that one process can read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


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
