"""RMSNorm: y = x / √(mean(x²) + ε) ⊙ w over the last dimension (arXiv:1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.nn.place import Ranks, local, with_summed_gradient


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose float32 weight is cast to the dtype of the activations, so that BF16 activations stay BF16."""

    ranks: Ranks | None = None
    """The ranks that normalise the other tokens; None: this rank has all."""

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape and dtype of x [..., width]."""
        weight = local(self.weight)
        if self.ranks is not None:
            weight = with_summed_gradient(weight, self.ranks)
        y: Tensor = F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)
        return y
