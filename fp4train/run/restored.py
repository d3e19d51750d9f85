"""The state of a checkpoint for a run: every tensor is read as the run holds its own, this rank's part alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.checkpoint import Checkpoint, StoredTensors, escaped, unflatten
from fp4train.parallel.held import Inventory


def restored(
    found: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    inventory: Inventory | None = None,
) -> dict[str, Any]:
    """What `Run.state` gave, or without `optimizer` its weights alone; whether it fits is for `fit` to say.

    A weight lies as the model's of the same name and shape does, a moment of a parameter's shape as that parameter;
    all other tensors are whole.

    Args:
        inventory: of the whole model, where `model` holds some stages of it; only what is theirs is read.

    Raises:
        LookupError, TypeError, ValueError, OSError: it is not the state of a run, or its files changed.
    """
    layout: dict[str, Tensor] = {
        f"model/{escaped(name)}": tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)
    }
    elsewhere = set() if inventory is None else {f"model/{escaped(n)}" for n in inventory.away(model)}
    if optimizer is None:
        state = unflatten(_Placed(found.tensors, layout, {}, elsewhere), {"model": found.state["model"]})
        return state if inventory is None else {"model": inventory.own_weights(state["model"], model)}
    numbers = [number for group in optimizer.state_dict()["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if inventory is not None:
        of_whole = inventory.numbers_of(model, optimizer)
        numbers = [of_whole[number] for number in numbers]
        elsewhere |= {f"optimizer/state/{n}" for n in set(inventory.numbers.values()) - set(numbers)}
    moments = {f"optimizer/state/{escaped(n)}": p for n, p in zip(numbers, parameters, strict=True)}
    state = unflatten(_Placed(found.tensors, layout, moments, elsewhere), found.state)
    return state if inventory is None else inventory.own(state, model, optimizer)


class _Placed(Mapping[str, Tensor]):
    """Stored tensors, each as the one of its name in `layout` lies, or as the parameter in `moments` that has it; those
    that are held `elsewhere` are empty."""

    def __init__(
        self,
        stored: StoredTensors,
        layout: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        elsewhere: Collection[str],
    ) -> None:
        self.stored, self.layout, self.moments, self.elsewhere = stored, layout, moments, elsewhere

    def __getitem__(self, name: str) -> Tensor:
        own, above = self.layout.get(name), name.rpartition("/")[0]
        if name in self.elsewhere or above in self.elsewhere:
            return torch.empty(0)
        if own is None:
            own = self.moments.get(above)
        if own is None or tuple(own.shape) != self.stored.shape(name):
            return self.stored[name]
        return self.stored.read_like(name, own)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
