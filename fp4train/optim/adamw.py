"""AdamW (arXiv:1711.05101) with decay on matrices only; torch's fused kernel if the device has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fp4train.optim import Constants, has_fused


@dataclass(frozen=True, kw_only=True)
class AdamW(Constants):
    """The constants of AdamW, beside those of `Constants`.

    Args:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim.betas={self.betas} must be two numbers in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"optim.eps={self.eps} must be > 0")

    def over(self, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        """torch's AdamW over some parameters."""
        fused = has_fused(parameters)
        return torch.optim.AdamW(self.groups(parameters), lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)
