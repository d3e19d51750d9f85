"""The collectives of several ranks, tried where doctor is started once per rank.

    torchrun --nproc-per-node 8 -m fp4train doctor

What runs send: gradients in float32 and BF16 (all-reduce, reduce-scatter), weights in BF16 and
codes as bytes (all-gather). Each result is compared with the one that follows from the ranks'
numbers, then timed.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.errors import UserError, named
from fp4train.text import first_line

PATIENCE = timedelta(seconds=120)
"""Seconds that a collective may take, the meeting of the ranks included."""

SIZES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Bytes of the whole tensor, by device type."""

REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class CollectiveCheck:
    """One collective.

    Args:
        name, dtype: name of the collective, and dtype of the tensor that it sends.
        correct: whether this rank got what it should; None: it failed before.
        rate: bytes/s per rank that pass through its link (NCCL's bus bandwidth); None: it failed
            before.
        problem: sentence about what is wrong, or None.
    """

    name: str
    dtype: str
    correct: bool | None
    rate: float | None
    problem: str | None = None


def started() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) where it is alone."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def meeting() -> Iterator[str]:
    """All ranks of the launcher in one process group; yields its backend.

    Raises:
        UserError: they do not meet.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        rank, ranks = started()
        where = ", ".join(
            f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT")
        )
        raise UserError(
            f"rank {rank} of {ranks} does not meet the others by {backend} ({where}): "
            f"{first_line(error)}"
        ) from error
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def collectives(device: str) -> list[CollectiveCheck]:
    """Try and time them on tensors of `device`; every rank must call it."""
    return [
        _tried("all-reduce", "float32", device, _all_reduce),
        _tried("all-reduce", "bfloat16", device, _all_reduce),
        _tried("reduce-scatter", "float32", device, _reduce_scatter),
        _tried("all-gather", "bfloat16", device, _all_gather),
        _tried("all-gather", "uint8", device, _all_gather),
    ]


def _tried(
    name: str, dtype: str, device: str, collective: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> CollectiveCheck:
    """`collective` of (this rank's tensor) → (what came, what should have come)."""
    ranks = dist.get_world_size()
    kind: torch.dtype = getattr(torch, dtype)
    size = SIZES[device] // kind.itemsize // ranks * ranks
    try:
        mine = torch.full((size,), dist.get_rank() + 1, dtype=kind, device=device)
        received, expected = collective(mine.clone())
        correct = torch.equal(received, expected)
        seconds = min(_seconds(collective, mine.clone(), device) for _ in range(REPEATS))
    except Exception as error:  # of NCCL, gloo, the network: to be reported, whatever it is
        why = f"{name} of {dtype}: {named(error)}"
        return CollectiveCheck(name=name, dtype=dtype, correct=None, rate=None, problem=why)
    share = (2 if name == "all-reduce" else 1) * (ranks - 1) / ranks
    if correct:
        problem = None
    else:
        problem = f"{name} of {dtype} gave rank {dist.get_rank()} wrong numbers"
    rate = share * size * kind.itemsize / seconds
    return CollectiveCheck(name=name, dtype=dtype, correct=correct, rate=rate, problem=problem)


def _seconds(collective: Callable[[Tensor], object], x: Tensor, device: str) -> float:
    dist.barrier()
    began = time.perf_counter()
    collective(x)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _all_reduce(x: Tensor) -> tuple[Tensor, Tensor]:
    ranks = dist.get_world_size()
    dist.all_reduce(x)
    return x, torch.full_like(x, ranks * (ranks + 1) / 2)


def _reduce_scatter(x: Tensor) -> tuple[Tensor, Tensor]:
    ranks = dist.get_world_size()
    received = x.new_empty(x.numel() // ranks)
    dist.reduce_scatter(received, list(x.chunk(ranks)))
    return received, torch.full_like(received, ranks * (ranks + 1) / 2)


def _all_gather(x: Tensor) -> tuple[Tensor, Tensor]:
    ranks = dist.get_world_size()
    share = x[: x.numel() // ranks].contiguous()
    received = x.new_empty(share.numel() * ranks)
    dist.all_gather(list(received.chunk(ranks)), share)
    expected = (
        torch.arange(1, ranks + 1, device=x.device).to(x.dtype).repeat_interleave(share.numel())
    )
    return received, expected
