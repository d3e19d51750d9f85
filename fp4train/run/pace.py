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
        self._times: list[Any] = []
        """When the passes began and ended, in turn."""
        if run.world.size > 1 and not run.config.train.compile:
            for block in find_blocks(run.model):
                block.register_forward_pre_hook(self._note)
                block.register_forward_hook(self._note)

    def seconds(self) -> float:
        """Mean time of the passes that were done since the last call; 0: none was. Waits for no
        device.
        """
        passes = list(zip(self._times[::2], self._times[1::2], strict=True))
        if self.run.device.type == "cuda":
            passes = [(begin, end) for begin, end in passes if end.query()]
            times = [begin.elapsed_time(end) / 1e3 for begin, end in passes]
        else:
            times = [end - begin for begin, end in passes]
        del self._times[: 2 * len(times)]
        return float(sum(times) / max(len(times), 1))

    def _note(self, *of_hook: object) -> None:
        now: Any = time.perf_counter()
        if self.run.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        self._times.append(now)
