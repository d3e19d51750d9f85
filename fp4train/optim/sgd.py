"""Stochastic gradient descent with momentum, and decay on matrices only."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fp4train.optim import Constants, has_fused, trainable_elements


@dataclass(frozen=True, kw_only=True)
class SGD(Constants):
    """The constants of SGD, beside those of `Constants`.

    Args:
        momentum: decay rate of the mean of gradients; 0: none is kept.
        nesterov: whether the step looks ahead along it.
    """

    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum={self.momentum} must lie in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("optim.nesterov=true needs optim.momentum above 0")

    def over(
        self, parameters: Mapping[str, nn.Parameter], spared: Collection[nn.Parameter]
    ) -> torch.optim.SGD:
        """torch's SGD over some parameters, by name."""
        groups = self.groups(parameters.values(), spared)
        fused = has_fused(parameters)
        return torch.optim.SGD(
            groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=fused
        )

    def moment_bytes(self, model: nn.Module) -> int:
        """Bytes of the mean of gradients, float32, of the trainable parameters of `model`."""
        return 4 * trainable_elements(model) if self.momentum else 0
