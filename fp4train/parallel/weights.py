"""Other weights in the place of a model's, as for an evaluation of an average."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp4train.shards import local


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which `model` has other weights. The two change places, a tensor at a time,
    without memory for a second model; on leaving they change back.

    Args:
        weights: name in the model's state dict → this rank's part (`shards.local`) of the weight
            that takes its place; other weights stay.
    """
    _swap(model, weights)
    try:
        yield
    finally:
        _swap(model, weights)


@torch.no_grad()
def _swap(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    # FSDP, which may have left whole weights in place, puts the shards back for the state dict
    tensors = model.state_dict()
    for name, other in weights.items():
        part = local(tensors[name])
        kept = part.clone()
        part.copy_(other)
        other.copy_(kept)
