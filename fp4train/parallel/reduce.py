"""The reduction of gradients in BF16: what is sent is rounded once, and summed in float32.

A reduce-scatter in BF16 would round each partial sum. Here each rank sends each other one that rank's part of its own
gradient, as many bytes as a reduce-scatter, and adds what it got in float32 in the order of ranks. Microbatches are
summed in float32 before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
