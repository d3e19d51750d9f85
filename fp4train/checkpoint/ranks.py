"""The ranks that write or read one checkpoint together. A rank alone is the same object, whose collectives do nothing.

What they tell each other is text of a few hundred bytes, over a process group of CPUs (gloo) that nobody else uses: a
checkpoint is written in a thread while the training's own group is at work, and two threads on one group abort it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CheckpointGroup:
    """The ranks of `group`, in its order; None: this process alone.

    Args:
        group: of gloo, for checkpoints only (`torch.distributed.new_group(backend="gloo")`, called by all ranks).
        leads: this rank writes what several hold alike and no mesh describes; None: the first rank does. With a
            pipeline the first rank of each stage does.
    """

    def __init__(self, group: ProcessGroup | None = None, *, leads: bool | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.leads = self.rank == 0 if leads is None else leads

    @property
    def first(self) -> bool:
        """Whether this rank is the one that makes, names and removes folders."""
        return self.rank == 0

    def exchange(self, text: str) -> list[str]:
        """What each rank gives, in the order of ranks.

        Raises:
            RuntimeError: a rank has ended, or did not come within the group's time.
        """
        if self.group is None:
            return [text]
        from torch.distributed import all_gather

        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        all_gather(sizes, torch.tensor([len(text.encode())]), group=self.group)
        counts = [int(size) for size in sizes]
        longest = max(1, *counts)
        sent = torch.zeros(longest, dtype=torch.uint8)
        sent[: len(data)] = data[:longest]
        received: list[Tensor] = [torch.empty_like(sent) for _ in counts]
        all_gather(received, sent, group=self.group)
        return [bytes(each[:count].tolist()).decode() for each, count in zip(received, counts, strict=True)]

    def agree(self, problem: str | None) -> str | None:
        """The first rank's problem, named by rank and machine; None where no rank has one."""
        if self.group is None:
            return problem
        told = self.exchange("" if problem is None else f"rank {self.rank} on {socket.gethostname()}: {problem}")
        return next((each for each in told if each), None)


ALONE = CheckpointGroup()
