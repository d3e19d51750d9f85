"""Rotary position embedding (arXiv:2104.09864) in the half-split layout of Llama's public checkpoints.

Pair i of a head consists of the elements i and i + E/2. At position t it is rotated by t·base^(−2i/E), so the score of
a query and a key depends only on the distance between their positions.
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
    """Queries or keys [B, heads, T, E], rotated by the angles with the given cosines and sines."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE
