"""Layers that model families share: RMSNorm, rotary positions, causal attention with grouped queries.

RMSNorm: y = x / √(mean(x²) + ε) ⊙ w over the last dimension (arXiv:1910.07467).

Rotary position embedding (arXiv:2104.09864) has the half-split layout of Llama's public checkpoints. Pair i of a head
consists of the elements i and i + E/2. At position t it is rotated by t·base^(−2i/E), so the score of a query and a key
depends only on the distance between their positions. Grouped queries: arXiv:2305.13245.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.backends import widened
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


def rope_angles(seq_len: int, head_dim: int, base: float) -> Tensor:
    """Rotation angles [seq_len, head_dim] in radians, on the CPU; the second half of a row repeats the first."""
    with torch.device("cpu"):  # on the meta device torch would load its compiler for these few operations
        inverse = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(seq_len).float(), inverse)
    return torch.cat((angles, angles), dim=-1)


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Queries or keys [B, heads, T, E], rotated by the angles with the given cosines and sines."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


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
