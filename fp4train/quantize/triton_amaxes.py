"""The amaxes of several weights in one launch, which reads the addresses of their parts from a table
on the GPU.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fp4train.quantize.launch import Launch

PART = 1 << 16
"""Numbers that a program reads."""


def takes(w: Tensor) -> bool:
    """Whether the amax of w is measured with others: of parameters in float32, in one piece. A graph
    that is captured would read the table when it may be another's memory.
    """
    captured = w.is_cuda and torch.cuda.is_current_stream_capturing()
    plain = type(w) is torch.nn.Parameter and w.dtype is torch.float32
    return plain and w.is_contiguous() and not captured


def amaxes(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The largest magnitude of each weight that it `takes`, 0-d float32; NaN if it holds one."""
    out = torch.zeros(len(weights), device=weights[0].device)
    launch, parts = _planned(tuple((w.data_ptr(), w.numel()) for w in weights), out.device)
    launch(parts, out)
    return out.unbind()


@lru_cache(4)
def _planned(memory: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Launch, Tensor]:
    """The launch and its table, for weights of these addresses and sizes."""
    from fp4train.kernels.triton.quantize import amax_tensors

    parts = [
        (address + 4 * start, min(PART, count - start), place)
        for place, (address, count) in enumerate(memory)
        for start in range(0, count, PART)
    ]
    launch = Launch(amax_tensors, len(parts), (), {"SIZE": 8192}, 8, {1: torch.int32})
    return launch, torch.tensor(parts, device=device)
