"""AdamW (arXiv:1711.05101) with decay on matrices only; torch's fused kernel if the device has
one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp4train.optim import Constants, has_fused, trainable_elements
from fp4train.optim.rounded import RoundedAdamW
from fp4train.shards import is_sharded
from fp4train.text import check_choice

MOMENT_BYTES = {"float32": 8, "bfloat16": 4}
"""Bytes per parameter of both moments, by their dtype."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Constants):
    """The constants of AdamW, beside those of `Constants`.

    Args:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        moments: dtype in which both are kept: "float32", or "bfloat16", rounded stochastically
            (`optim/rounded.py`).
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    moments: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim.betas={self.betas} must be two numbers in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"optim.eps={self.eps} must be > 0")
        check_choice("optim.moments", self.moments, MOMENT_BYTES)

    def over(
        self, parameters: Mapping[str, nn.Parameter], spared: Collection[nn.Parameter]
    ) -> torch.optim.AdamW:
        """AdamW over some parameters, by name: torch's, or that of moments in BF16."""
        fused = has_fused(parameters)
        groups = self.groups(parameters.values(), spared)
        if self.moments == "float32":
            kind = _ShardedAdamW if any(map(is_sharded, parameters.values())) else torch.optim.AdamW
            return kind(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)
        names = {parameter: name for name, parameter in parameters.items()}
        return RoundedAdamW(groups, names, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)

    def moment_bytes(self, model: nn.Module) -> int:
        """Bytes of both moments of the trainable parameters of `model`."""
        return MOMENT_BYTES[self.moments] * trainable_elements(model)


class _ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW, whose kernel takes what this rank holds: a DTensor costs a dispatch of its own
    in every list.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]
        return has_complex
