"""AdamW (arXiv:1711.05101) with decay on matrices only; torch's fused kernel if the device has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The constants of AdamW.

    Args:
        lr: peak learning rate; the schedule multiplies it.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: for parameters with two or more dimensions; norms and biases have none.
        clip: largest global gradient norm; None does not clip.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if not self.lr > 0:
            raise ValueError(f"optim.lr={self.lr} must be > 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim.betas={self.betas} must be two numbers in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"optim.eps={self.eps} must be > 0")
        if self.weight_decay < 0:
            raise ValueError(f"optim.weight_decay={self.weight_decay} must be ≥ 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"optim.clip={self.clip} must be > 0, or null for no clipping")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters.

        Raises:
            ValueError: the model has no trainable parameter.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to optimise")
        # The fused kernel takes the parameters of one mesh of ranks at a time.
        meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in parameters)
        groups = []
        for mesh in meshes:
            here = [p for p in parameters if getattr(p, "device_mesh", None) == mesh]
            groups.append({"params": [p for p in here if p.dim() >= 2], "weight_decay": self.weight_decay})
            groups.append({"params": [p for p in here if p.dim() < 2], "weight_decay": 0.0})
        fused = parameters[0].device.type in ("cpu", "cuda")
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.lr, betas=self.betas, eps=self.eps, fused=fused
        )
