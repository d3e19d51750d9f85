"""Weights that are written between two steps, as by a resume, or for an evaluation of others.

Within a step weights are constant, and much is made of them once: forms that GEMMs multiply
(`nn.weights`), codes of a backend's kernels, codes and joint amaxes of shards (`parallel.gather`),
and whole weights that FSDP leaves in place after a pass without backward. None of them sees a write
to a shard: torch counts versions of the tensor that is written to, and a shard is another one. So
who writes says it here.

An optimizer step, and what follows it before the next pass, need not: the step is part of the key
of everything that is kept.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp4train.nn.planned import PlannedLayer
from fp4train.shards import local


def changed(model: nn.Module) -> None:
    """Drop everything that was made of the weights of `model`, on this rank, without a
    collective.
    """
    for module in model.modules():
        if isinstance(module, PlannedLayer):
            module.drop_made()
    # FSDP, which may have left whole weights in place, puts the shards back for it
    model.state_dict()


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
    changed(model)  # before the state dict is asked: shards, not whole weights, are written
    tensors = model.state_dict()
    for name, other in weights.items():
        part = local(tensors[name])
        kept = part.clone()
        part.copy_(other)
        other.copy_(kept)
    changed(model)
