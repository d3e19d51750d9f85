"""`train.cuda_graph=block`: the forward and the backward pass of each block are recorded as CUDA graphs, no other work.

What lies between the blocks stays with the host: its collectives, the hooks of FSDP, embedding, head and loss, the
sums of gradients over ranks, the optimizer. So blocks are recorded where a whole step (`step_graph.py`) cannot be: on
several ranks, in the stages of a pipeline, with any optimizer, loss scale or teacher, and around what torch.compile
made of a block.

After `WARM_UP` steps each pass of a block in a step is recorded when it comes, and replayed at once: a pair of graphs
for each block and microbatch, since the place of a microbatch's tokens keys its random bits. The pairs share one pool
of memory. As the steps that follow replay them in the same order, memory that was free at some point of the recorded
step is free at that point of each step. A step's activations take the memory of an eager one.

    forward    x is copied to where the graph reads it, unless another block's graph left it there; y is what it wrote
    backward   the same of dy and dx
    weights    read where they lie. What FSDP gathers has new memory each time and is copied into the pool first, for
               forward and for backward: 16 bytes per weight and microbatch, in the memory of one block
    gradients  of the first microbatch are new; those of the others are added to them by the graph, in the weight's
               GEMM where that can. FSDP gets those of each microbatch, which are added to its sum: 12 bytes
    recomputed blocks: the forward graph keeps x alone, and the backward graph computes the block again
    compiled blocks: graphs hold the compiler's kernels, made in the steps before; a block that would be compiled
                     while it is recorded is refused, as the compiler asks the GPU for numbers and times kernels

Collectives of tensor-parallel ranks within a block are recorded with it; of their DTensors a graph has this rank's
part. With delayed scaling histories roll on the host before the passes, and graphs read and write one amax of each.
Experts, of which the host reads how many rows each has, are left to it: of their blocks attention is recorded, and
what it adds to x is kept where they are recomputed.

The least is no copy. Of the residual stream only x of the first block and dy of the last are copied, 4 bytes per BF16
element each. The copies of FSDP's weights are 16 N / M bytes per token, of a block of N weights and a microbatch of M
tokens; to avoid them FSDP would have to gather into memory that does not move.

While a block is recorded, parameters of their own stand for its weights, so that no gradient reaches the model's
before a replay has computed it. torch.cuda.make_graphed_callables and TE's of the same name record blocks, too, before
training and from sample inputs: they need every microbatch in flight and the order of all passes beforehand, leave
gathered weights and hooks to the caller, and the sums of gradients to a kernel per weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4train.data.loader import Rows
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.scaling import DelayedScaling, HeldAmaxes
from fp4train.precision import Recipe
from fp4train.precision.layers import find_blocks
from fp4train.run.block_pass import Block, block_parts
from fp4train.run.step import Queued
from fp4train.run.step_graph import WARM_UP, CudaRecorder, GraphSteps, Recorder, nothing_drawn, recomputing

if TYPE_CHECKING:
    from fp4train.run.run import Run


class RecordedBlocks(GraphSteps):
    """Queues steps whose blocks are recorded."""

    mode = "block"

    def __init__(self, run: Run, recorder: Callable[[torch.device], Recorder] = CudaRecorder) -> None:
        super().__init__(run, recorder)
        self.running = self.recording = False
        self.moved = run.world.data_mesh is not None and run.world.mesh.data > 1
        """Whether the blocks' weights are FSDP's, whose memory moves."""
        self._made: set[int] = set()
        self._amaxes = HeldAmaxes((), (0, 0))
        self.anchor = torch.zeros((), device=run.device, requires_grad=True)
        self._recomputing = recomputing(run.model)
        self.recomputed = bool(self._recomputing)
        """Whether blocks keep their inputs alone for the backward pass."""
        compiled = run.config.train.compile
        self.blocks = [
            Block(self, block, *part, compiled=compiled)
            for block in find_blocks(run.model)
            for part in block_parts(block)
        ]

    def step(self, recipe: Recipe, rows: Iterable[Rows]) -> Queued:
        """Queue the step that `run.step` is at.

        Raises:
            UserError: a block cannot be recorded. The weights are as they were before the step then.
        """
        run, _ = self.run, self._begin()
        position = run.config.run.seed, run.step
        self.recording = recording = self._warm == WARM_UP
        if recording:
            # This drops prepared weights: an evaluation may have made this step's, which the graphs must make.
            run.load_scaling(run.scaling())
        for block in self.blocks:
            block.calls = 0
        checked = nothing_drawn(run, self.mode) if self._warm < WARM_UP else nullcontext()
        try:
            with checked, self._blocks_run(), self._amaxes.step(position):
                queued = self._eager.step(recipe, rows)
        except RuntimeError as error:
            if not recording or run.mid_update:
                raise
            raise self._refused(error) from error
        self._warm += 1
        if self._warm == WARM_UP:
            modules = (each for block in self.blocks for recorded in block.recorded for each in recorded.modules())
            states = (each.states.get(DelayedScaling.kind) for each in modules if isinstance(each, PlannedLayer))
            self._amaxes = HeldAmaxes([each for each in states if isinstance(each, DelayedScaling)], position)
        return queued

    def drop(self) -> None:
        self._recorder, self._warm, self._amaxes = None, 0, HeldAmaxes((), (0, 0))
        self._made.clear()
        for block in self.blocks:
            block.passes, block.leaves = [], None

    @contextmanager
    def _blocks_run(self) -> Iterator[None]:
        """Blocks are recorded or replayed, and recompute by themselves, in what their graphs hold."""
        self.run.counters, self.running = self._counters, True
        for each in self._recomputing:
            each.recomputes = False
        try:
            yield
        finally:
            self.run.counters, self.running, self.recording = None, False, False
            for each in self._recomputing:
                each.recomputes = True

    def holds(self, tensor: Tensor) -> bool:
        """Whether a graph of the recorded step wrote `tensor`, at an address that is the same in all steps."""
        return tensor.data_ptr() in self._made

    def made(self, tensor: Tensor) -> Tensor:
        """The address of what a graph wrote."""
        self._made.add(tensor.data_ptr())
        return self.pool.address(tensor)

    @property
    def pool(self) -> Recorder:
        """The first recorder, which knows the memory of all."""
        assert self._recorder is not None
        return self._recorder
