"""The gradient norm over all ranks, and clipping by it.

    norm = sqrt(Σ_p Σ_i g_pi²)

Each rank sums the squares of the parts it holds. Summed in float32 the result would depend on how the gradients are
cut, in the last bits, and training amplifies them: two runs of 4-bit training part within a few steps. In float64 the
rounding to float32 at the end removes the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4train.parallel.world import World


def gradient_norms(gradients: Sequence[Tensor], world: World) -> tuple[Tensor, Tensor]:
    """(The norm of all gradients, a 0-d float32, the norm of each of this rank's parts, float32 [N]).

    They are NaN or infinite if a gradient is.

    Args:
        gradients: this rank's parts (`shards.local`), at least one.
    """
    if not world.norm64:
        norms = torch.stack(torch._foreach_norm(list(gradients)))
        return torch.linalg.vector_norm(norms), norms
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float64))
    return world.summed_over_parts(norms.square().sum()).sqrt().float(), norms.float()


def clip(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Scale this rank's parts of the gradients, in place, so that their norm is at most `most`."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(gradients), factor)
