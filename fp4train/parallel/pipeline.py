"""The microbatches of a step or an evaluation through the model: one after another, or over the
stages of a pipeline.

The stages are torch's (`torch.distributed.pipelining`), with two additions. Each microbatch runs in
a context of its own: the place of its tokens in the batch keys the random bits, and its layers
share what they quantise. What stages send each other has the shape and dtype that this file says:
torch would find them by a forward pass on meta tensors, outside of that context, in another dtype.
A tensor-parallel rank sends the tokens that it holds to the rank with the same ones on the next
stage.

A pipeline gives the bits of one stage: gradients are summed in the order of microbatches, and a
block's input and its gradient are sent in the dtype in which they would have been kept.

A weight may lie on two stages: the embedding on the first and, tied to it, the head on the last.
The first stage owns it: it alone has a gradient, moments and a place in the checkpoint. Per
microbatch the last stage sends it the gradient of its copy, so that the sum is the one of a single
stage in every bit; after an optimizer step it sends the new weight back. Both cost V·D·4 bytes, per
microbatch and per step; tensor-parallel ranks each send their part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp4train.models.common import StageCut, TokenRanks
from fp4train.parallel.config import Parallel
from fp4train.parallel.held import Inventory
from fp4train.parallel.world import World
from fp4train.shards import like, local

AT_A_TIME = 4
"""Microbatches per stage of an evaluation: a stage keeps a place for the input of each, and idles
for a fifth.
"""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Sequences of one forward pass.

    Args:
        tokens_BT, targets_BT: on the device.
        context: makes the context of a forward pass: recipe, step, place of the tokens.
        dtype: dtype of activations in that context.
        last: whether no other one of this rank's follows in the step.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    context: Callable[[], AbstractContextManager[object]]
    dtype: torch.dtype
    last: bool = True

    def loss(self, model: nn.Module) -> Tensor:
        """The mean loss of the whole `model`."""
        with self.context():
            loss: Tensor = model(self.tokens_BT, self.targets_BT)
        return loss


class Pipeline:
    """The stages of a model that this rank holds, and the schedules that run them.

    Args:
        stages: stages by index; of interleaved stages a rank holds every `world.mesh.pipeline`-th
            one.
        model: all of them together; its modules are those of `stages`.
        cut: how the model is cut.
        inventory: the whole model's state.
        tied: the weight that the first and the last stage share, if any.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, nn.Module],
        model: nn.Module,
        cut: StageCut,
        inventory: Inventory,
        tied: TiedWeight | None,
        parallel: Parallel,
        world: World,
    ) -> None:
        self.stages = stages
        self.model = model
        self.cut = cut
        self.inventory = inventory
        self.tied = tied
        self.parallel = parallel
        self.world = world
        self.tensor: TokenRanks | None = getattr(model, "tensor", None)
        self.count = world.mesh.pipeline * len(stages)
        self._microbatches: list[Microbatch] = []
        self._losses: list[Tensor] = []
        self._weight = 1.0
        self._schedules: dict[tuple[object, ...], tuple[Any, list[Any]]] = {}

    def train(self, microbatches: list[Microbatch], weight: float) -> list[Tensor]:
        """Forward and backward passes of all microbatches, each loss times `weight`; the losses, on
        the last stage.
        """
        self._weight = weight
        losses = self._run(microbatches, training=True)
        if self.tied is not None:
            self.tied.wait()
        return losses

    def evaluate(self, microbatches: Iterable[Microbatch]) -> Iterator[Tensor]:
        """Forward passes alone; the losses, on the last stage. As many at a time as stages may hold
        the inputs of.
        """
        remaining = iter(microbatches)
        while group := list(islice(remaining, AT_A_TIME * self.count)):
            with torch.no_grad():
                losses = self._run(group, training=False)
            yield from losses

    def copy_tied(self) -> None:
        """Make the last stage's copy of a tied weight equal to the first stage's, which has
        changed.
        """
        if self.tied is None or self.world.stage not in (0, self.world.mesh.pipeline - 1):
            return
        owner = self.world.stage == 0
        ((copy, local),) = self.inventory.tied.items()
        self.tied.copy(self.model.get_parameter(local if owner else copy), owner=owner)

    # -- torch's schedules -------------------------------------------------------------------------

    def _run(self, microbatches: list[Microbatch], *, training: bool) -> list[Tensor]:
        self._microbatches = microbatches
        self._losses = []
        template = microbatches[0]
        for stage in self.stages.values():
            stage.training = self.model.training
        key = (len(microbatches), template.tokens_BT.shape, template.dtype, training)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(*key)
        schedule, stages = self._schedules[key]
        inputs: tuple[Tensor, ...] = ()
        named: dict[str, Tensor] = {}
        if 0 in self.stages:
            inputs = (torch.cat([microbatch.tokens_BT for microbatch in microbatches]),)
        if self.count - 1 in self.stages:
            named["targets_BT"] = torch.cat([microbatch.targets_BT for microbatch in microbatches])
        # torch's `target` goes to the function of the loss, which the last stage has computed
        # already.
        schedule.step(
            *inputs, target=torch.arange(len(microbatches)), return_outputs=False, **named
        )
        for stage in stages:
            stage.clear_runtime_states()
        self._microbatches = []
        return self._losses

    def _schedule(
        self, count: int, shape: torch.Size, dtype: torch.dtype, training: bool
    ) -> tuple[Any, list[Any]]:
        from torch.distributed.pipelining import (
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
            ScheduleLoopedBFS,
        )

        stages = [self._stage(index, shape, dtype, training) for index in self.stages]
        loss = self._weighted if training else None
        if len(stages) > 1:
            kind = ScheduleInterleaved1F1B if training else ScheduleLoopedBFS
            several = kind(stages, count, loss_fn=loss, scale_grads=False)
            _let_blocks_gather(several)
            return several, stages
        schedule = (
            Schedule1F1B if training and self.parallel.pp_schedule == "1f1b" else ScheduleGPipe
        )
        return schedule(stages[0], count, loss_fn=loss, scale_grads=False), stages

    def _weighted(self, loss: Tensor, number: Tensor) -> Tensor:
        return loss * self._weight

    def _stage(self, index: int, shape: torch.Size, dtype: torch.dtype, training: bool) -> Any:
        from fp4train.parallel.context_stage import ContextStage

        sizes = (*shape, self.cut.width)
        if self.tensor is None:
            stage_sizes = sizes
        else:
            stage_sizes = self.tensor.stream(*sizes)
        stream = torch.empty(stage_sizes, dtype=dtype, device="meta", requires_grad=training)
        loss = torch.empty((), device="meta", requires_grad=training)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        return ContextStage(
            self.stages[index],
            index,
            self.count,
            self.world.device,
            input_args=tokens if index == 0 else stream,
            output_args=loss if index == self.count - 1 else stream,
            group=self.world.pipeline,
            context=lambda number: self._microbatches[number].context(),
            take_loss=lambda loss: self._losses.append(loss),
            seq_len=shape[1],
        )


def _let_blocks_gather(schedule: Any) -> None:
    """Let each block of interleaved stages gather its weights in every pass, as without stages.

    torch gathers those of a whole stage before its first pass, when the new codes do not exist
    yet (`gather.begin`), and keeps them until its last one.
    """
    from torch.distributed.pipelining.schedules import RESHARD, UNSHARD

    def gathering(action: Any, context: Any) -> None:
        context.schedule_ref.unsharded_stages.add(action.stage_index)

    def freed(action: Any, context: Any) -> None:
        context.schedule_ref.unsharded_stages.discard(action.stage_index)

    schedule.register_custom_function(UNSHARD, gathering)
    schedule.register_custom_function(RESHARD, freed)


class TiedWeight:
    """The copies of one tied weight, or of this rank's part of it, on the first and the last stage.

    Args:
        world: every rank must make this object, for the groups.
        timeout: seconds that a rank waits for the other.
    """

    def __init__(self, world: World, timeout: float) -> None:
        rank_place = (
            world.token_rank,
            0 if world.tensor is None else world.tensor.get_local_rank(),
        )
        at = {place: rank for rank, place in enumerate(world.gathered((world.stage, *rank_place)))}
        self.group: dist.ProcessGroup | None = None
        # A group of its own: between two ranks of one group messages are matched by their order
        # alone.
        for place in product(range(world.mesh.token_ranks), range(world.mesh.tensor)):
            pair = [at[0, *place], at[world.mesh.pipeline - 1, *place]]
            group = dist.new_group(pair, timeout=timedelta(seconds=timeout))
            if place == rank_place and world.stage in (0, world.mesh.pipeline - 1):
                self.group = group
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def send(self, gradient: Tensor) -> None:
        """Give the gradient of the copy in one microbatch to the first stage, in the order of
        backward passes.
        """
        gradient = local(gradient).contiguous()
        work = dist.isend(gradient, group=self.group, group_dst=0)
        assert work is not None
        self._sent.append((gradient, work))

    def receive(self, weight: Tensor) -> Tensor:
        """The next gradient that was sent; it lies as `weight` does."""
        gradient = torch.empty_like(local(weight), memory_format=torch.contiguous_format)
        dist.recv(gradient, group=self.group, group_src=1)
        return like(weight, gradient)

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    @torch.no_grad()
    def copy(self, weight: Tensor, *, owner: bool) -> None:
        """Make the copy on the last stage equal to the `weight` of the first; each rank its
        part.
        """
        if owner:
            dist.send(local(weight).detach(), group=self.group, group_dst=1)
        else:
            dist.recv(local(weight).detach(), group=self.group, group_src=0)
