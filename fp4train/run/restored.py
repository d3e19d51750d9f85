"""The state of a checkpoint for a run: every tensor is read as the run holds its own, this rank's part alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.checkpoint import Checkpoint, StoredTensors, escaped, unflatten


def restored(found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What `Run.state` gave, or without `optimizer` its weights alone; whether it fits is for `fit` to say.

    A weight lies as the model's of the same name and shape does, a moment of a parameter's shape as that parameter;
    all other tensors are whole.

    Raises:
        LookupError, TypeError, ValueError, OSError: it is not the state of a run, or its files changed.
    """
    layout: dict[str, Tensor] = {
        f"model/{escaped(name)}": tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)
    }
    if optimizer is None:
        return unflatten(_Placed(found.tensors, layout, {}), {"model": found.state["model"]})
    numbers = [number for group in optimizer.state_dict()["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {f"optimizer/state/{escaped(n)}": p for n, p in zip(numbers, parameters, strict=True)}
    return unflatten(_Placed(found.tensors, layout, moments), found.state)


class _Placed(Mapping[str, Tensor]):
    """Stored tensors, each as the one of its name in `layout` lies, or as the parameter in `moments` that has it."""

    def __init__(self, stored: StoredTensors, layout: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        self.stored, self.layout, self.moments = stored, layout, moments

    def __getitem__(self, name: str) -> Tensor:
        own = self.layout.get(name)
        if own is None:
            own = self.moments.get(name.rpartition("/")[0])
        if own is None or tuple(own.shape) != self.stored.shape(name):
            return self.stored[name]
        return self.stored.read_like(name, own)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
