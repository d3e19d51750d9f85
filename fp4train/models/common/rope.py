"""Rotary position embedding (arXiv:2104.09864) in the half-split layout of Llama's public checkpoints.

Pair i of a head is made of the elements i and i + E/2. At position t it turns by t·base^(−2i/E), so the score of a
query and a key depends on the distance of their positions alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(seq_len: int, head_dim: int, base: float) -> Tensor:
    """Rotation angles [seq_len, head_dim] in radians, float32; the second half of a row repeats the first."""
    inverse = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(seq_len).float(), inverse)
    return torch.cat((angles, angles), dim=-1)


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Queries or keys [B, heads, T, E], turned by the angles whose cosines and sines are given."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE
