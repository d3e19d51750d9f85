"""Causal self-attention with grouped queries (arXiv:2305.13245) and rotary positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.backends import widened
from fp4train.models.common.rope import rotate


class Attention(nn.Module):
    """softmax(q·kᵀ/√E + causal mask)·v, with the heads combined by `wo`: x [B, T, D] → [B, T, D].

    The four projections are linear layers without bias, which `fp4train.convert` replaces; the products of queries,
    keys and values stay in the dtype of the activations.

    Args:
        width: D, the width of the residual stream; a multiple of `heads`.
        heads: number of query heads, with E = width / heads elements each.
        kv_heads: number of key and value heads; divides `heads`.
    """

    def __init__(self, *, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = width // heads
        self.wq = nn.Linear(width, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Attention within each sequence; `cos_TE` and `sin_TE` are those of `rope_angles` for its T positions.

        If tensor-parallel ranks share the tokens, x and the result are this rank's rows [B·T / p, D].
        """
        time = cos_TE.shape[0]
        q = self.wq(x_BTD).view(-1, time, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x_BTD).view(-1, time, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x_BTD).view(-1, time, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos_TE, sin_TE), rotate(k, cos_TE, sin_TE)
        grouped = self.kv_heads != self.heads
        y = widened(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out
