"""Gradients of all ranks: their norm, clipping by it, the optimizer step that it may hold back, their sum in BF16.

    norm = sqrt(Σ_p Σ_i g_pi²)

Each rank sums the squares of the parts it holds. Summed in float32 the result would depend on how the gradients are
cut, in the last bits, and training amplifies them: two runs of 4-bit training part within a few steps. In float64 the
rounding to float32 at the end removes the difference. One rank sums as many do: two ranks are two microbatches.

Where shards send gradients in BF16, what is sent is rounded once, and summed in float32; a reduce-scatter in BF16 would
round each partial sum. Each rank sends each other one that rank's part of its own gradient, as many bytes as a
reduce-scatter, and adds what it got in float32 in the order of ranks. Microbatches are summed in float32 before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.parallel.world import World

_PIECE = 1 << 16
"""Elements of a tensor on a CPU that are cast at once: half a megabyte, which stays in the cache."""


def gradient_norms(
    gradients: Sequence[Tensor], world: World, copies: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(The norm of all gradients, a 0-d float32, the norm of each of this rank's parts, float32 [N]).

    They are NaN or infinite if a gradient is.

    Args:
        gradients: this rank's parts (`shards.local`), at least one.
        copies: of each, on how many tensor-parallel ranks the same part lies; None: on one.
    """
    squares = _squares(gradients)
    once = squares if copies is None else squares / torch.tensor(copies, device=squares.device)
    return world.summed_over_parts(once.sum()).sqrt().float(), squares.sqrt().float()


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each, float64 [N].

    One kernel for all of them on a GPU. On a CPU torch would make a float64 copy of each tensor.
    """
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float64)).square()
    pieces = (map(Tensor.double, torch.split(gradient.reshape(-1), _PIECE)) for gradient in gradients)
    return torch.stack([torch.stack([exact.dot(exact) for exact in each]).sum() for each in pieces])


def clip(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Scale this rank's parts of the gradients, in place, so that their norm is at most `most`."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(gradients), factor)


def step_unless(optimizer: torch.optim.Optimizer, failed: Tensor) -> None:
    """`optimizer.step()` where `failed` is False; where it is True, weights, moments and step counts stay as they are.

    torch's fused optimizers take the flag into their kernel, as they do for `torch.amp.GradScaler`. For others the host
    waits until the flag is known.

    Args:
        optimizer: whose gradients are ready.
        failed: bool [], on the device of the parameters.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        if not bool(failed):
            optimizer.step()
        return
    optimizer.found_inf = failed.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


class RoundedReduceScatter:
    """FSDP's `ReduceScatter` over ranks that send BF16."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum the parts of `input_tensor` that are this rank's into `output_tensor`."""
        assert op == dist.ReduceOp.SUM
        rounded = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(rounded)
        dist.all_to_all_single(received, rounded, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)
