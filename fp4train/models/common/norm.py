"""RMSNorm: y = x / √(mean(x²) + ε) ⊙ w over the last dimension (arXiv:1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.models.common.cut import TokenRanks, shared_by


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose float32 weight is cast to the dtype of the activations, so that BF16 activations stay BF16."""

    tensor: TokenRanks | None = None
    """The tensor-parallel ranks, each with the whole weight; with `sequence` they normalise the other tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape and dtype of x [..., width]."""
        weight = self.weight if self.tensor is None else shared_by(self.tensor, self.weight)
        y: Tensor = F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)
        return y
