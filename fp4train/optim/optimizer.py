"""The protocol of `optim=…`. A new optimizer is one dataclass like this, and one YAML in the group `optim`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Optimizer(Protocol):
    """The constants of an optimizer."""

    @property
    def lr(self) -> float:
        """Peak learning rate; every step sets it, times the schedule's factor, in all parameter groups."""
        ...

    @property
    def clip(self) -> float | None:
        """Largest global gradient norm; None does not clip."""
        ...

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters; its `state_dict` is saved with every checkpoint."""
        ...
