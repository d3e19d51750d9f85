"""RMSNorm: y = x / √(mean(x²) + ε) ⊙ w over the last dimension (arXiv:1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose float32 weight is cast to the dtype of the activations, so that BF16 activations stay BF16."""

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape and dtype of x [..., width]."""
        y: Tensor = F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        return y
