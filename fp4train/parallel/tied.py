"""A weight that lies on two stages of a pipeline: the embedding on the first and, tied to it, the head on the last.

The first stage owns it: it alone has a gradient, moments and a place in the checkpoint. Per microbatch the last stage
sends it the gradient of its copy, so that the sum is the one of a single stage in every bit; after an optimizer step it
sends the new weight back. Both cost V·D·4 bytes, per microbatch and per step; tensor-parallel ranks each send their
part.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.parallel.world import World
from fp4train.shards import like, local


class TiedWeight:
    """The copies of one tied weight, or of this rank's part of it, on the first and the last stage.

    Args:
        world: every rank must make this object, for the groups.
        timeout: seconds that a rank waits for the other.
    """

    def __init__(self, world: World, timeout: float) -> None:
        own = (world.data_rank, world.tensor_rank)
        at = {place: rank for rank, place in enumerate(world.gathered((world.stage, *own)))}
        self.group: dist.ProcessGroup | None = None
        # A group of its own: between two ranks of one group messages are matched by their order alone.
        for place in product(range(world.mesh.data), range(world.mesh.tensor)):
            pair = [at[0, *place], at[world.mesh.pipeline - 1, *place]]
            group = dist.new_group(pair, timeout=timedelta(seconds=timeout))
            if place == own and world.stage in (0, world.mesh.pipeline - 1):
                self.group = group
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def send(self, gradient: Tensor) -> None:
        """Give the gradient of the copy in one microbatch to the first stage, in the order of backward passes."""
        gradient = local(gradient).contiguous()
        work = dist.isend(gradient, group=self.group, group_dst=0)
        assert work is not None
        self._sent.append((gradient, work))

    def receive(self, weight: Tensor) -> Tensor:
        """The next gradient that was sent; it lies as `weight` does."""
        gradient = torch.empty_like(local(weight), memory_format=torch.contiguous_format)
        dist.recv(gradient, group=self.group, group_src=1)
        return like(weight, gradient)

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    @torch.no_grad()
    def copy(self, weight: Tensor, *, owner: bool) -> None:
        """Make the copy on the last stage equal to the `weight` of the first; each rank its part."""
        if owner:
            dist.send(local(weight).detach(), group=self.group, group_dst=1)
        else:
            dist.recv(local(weight).detach(), group=self.group, group_src=0)
