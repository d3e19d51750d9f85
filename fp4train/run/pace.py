"""Which of several ranks is the slowest.

The ranks of a step end it together, so that its time names none of them. In the forward pass of a
block a rank waits for no other replica or shard: its weights are gathered before. (Ranks of tensor
and context parallelism wait for each other within it, and count alike.) The mean time of these
passes compares ranks, whichever share of the blocks they hold.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from fp4train.companion import RunCompanion
from fp4train.precision.layers import find_blocks

if TYPE_CHECKING:
    from fp4train.run.run import Run


class Pace(RunCompanion):
    """Times the forward passes of this rank's blocks; those of one rank alone, and compiled ones,
    it does not.
    """

    def begin(self, run: Run) -> None:
        self._began: Any = None
        self._passes: list[tuple[Any, Any]] = []
        """When the passes began and ended; not those that recomputation leaves before their end."""
        if run.world.size > 1 and not run.config.train.compile:
            for block in find_blocks(run.model):
                block.register_forward_pre_hook(self._enter)
                block.register_forward_hook(self._leave)

    def seconds(self) -> float:
        """Mean time of the passes that were done since the last call; 0: none was. Waits for no
        device.
        """
        passes = self._passes
        if self.run.device.type == "cuda":
            passes = [(begin, end) for begin, end in passes if end.query()]
            times = [begin.elapsed_time(end) / 1e3 for begin, end in passes]
        else:
            times = [end - begin for begin, end in passes]
        del self._passes[: len(times)]
        return float(sum(times) / max(len(times), 1))

    def _enter(self, *of_hook: object) -> None:
        self._began = self._now()

    def _leave(self, *of_hook: object) -> None:
        self._passes.append((self._began, self._now()))

    def _now(self) -> Any:
        if self.run.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
