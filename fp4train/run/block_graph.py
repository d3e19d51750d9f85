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
    collectives of tensor-parallel ranks within a block are recorded; of DTensors the graphs have this rank's part
    delayed scaling: histories roll on the host before the passes; the graphs read and write one amax of each
    recomputed blocks: the forward graph keeps x alone, and the backward graph computes the block again

The least is no copy. Of the residual stream only x of the first block and dy of the last are copied, 4 bytes per BF16
element each. The copies of FSDP's weights are 16 N / M bytes per token, of a block of N weights and a microbatch of M
tokens; to avoid them FSDP would have to gather into memory that does not move.

While a block is recorded, parameters of their own stand for its weights, so that no gradient reaches the model's
before a replay has computed it. torch.cuda.make_graphed_callables and TE's of the same name record blocks, too, before
training and from sample inputs: they need every microbatch in flight and the order of all passes beforehand, leave
gathered weights and hooks to the caller, and the sums of gradients to a kernel per weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.data.loader import Rows
from fp4train.nn.ranks import local
from fp4train.nn.scaling import DelayedScaling, HeldAmaxes
from fp4train.precision import Recipe
from fp4train.precision.context import recompute_eagerly
from fp4train.precision.layers import find_blocks
from fp4train.run.step import Queued
from fp4train.run.step_graph import WARM_UP, CudaRecorder, GraphSteps, Recorder, nothing_drawn, recomputing
from fp4train.shards import like

if TYPE_CHECKING:
    from fp4train.run.run import Run

Place = tuple[nn.Module, str]
"""A module and the name of a parameter of it."""


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
        self.blocks = [Block(self, block, compiled=compiled) for block in find_blocks(run.model)]

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
            inside = (each.states.get(DelayedScaling.kind) for each in run.linears if each.layer.block is not None)
            self._amaxes = HeldAmaxes([each for each in inside if isinstance(each, DelayedScaling)], position)
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


class Block:
    """One block of the model; its `forward` is replaced by this.

    Args:
        compiled: whether torch.compile has what is recorded.
    """

    def __init__(self, steps: RecordedBlocks, block: nn.Module, *, compiled: bool) -> None:
        self.steps, self.block = steps, block
        self.inner: Callable[..., Tensor] = torch.compile(block.forward) if compiled else block.forward
        self.calls = 0
        """Forward passes so far in this step."""
        self.passes: list[BlockPass] = []
        """Passes that are recorded."""
        self.leaves: dict[Place, nn.Parameter] | None = None
        """Stand-ins of parameters at places that do not move."""
        block.forward = self

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        """y of the block's forward pass; eagerly outside of steps, and without gradients."""
        steps = self.steps
        if not steps.running or not torch.is_grad_enabled():
            return self.inner(x, *others)
        place, self.calls = self.calls, self.calls + 1
        if place < len(self.passes):
            one = self.passes[place]
        else:
            one = BlockPass(self)
            if steps.recording:
                self.passes.append(one)
        y: Tensor = _PassFunction.apply(x, steps.anchor, one, others)  # type: ignore[no-untyped-call]
        return y

    def work(self, *inputs: Any) -> Tensor:
        """The forward pass that is recorded."""
        return recompute_eagerly(self.inner, *inputs) if self.steps.recomputed else self.inner(*inputs)

    def places(self) -> Iterator[tuple[Place, nn.Parameter]]:
        """The block's parameters, as they are now."""
        for module in self.block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield (module, name), parameter

    def stand_ins(self) -> dict[Place, nn.Parameter]:
        """Stand-ins of the parameters: on their memory or, where that moves, in memory of the pool."""
        steps = self.steps
        if self.leaves is not None:
            return self.leaves
        new = torch.empty_like if steps.moved and steps.recording else Tensor.detach
        by_parameter: dict[nn.Parameter, nn.Parameter] = {}
        for _, parameter in self.places():
            if parameter not in by_parameter:
                leaf = nn.Parameter(new(local(parameter)), requires_grad=parameter.requires_grad)
                by_parameter[parameter] = leaf
        found = {place: by_parameter[parameter] for place, parameter in self.places()}
        if not steps.moved:
            self.leaves = found
        return found

    @contextmanager
    def holding(self, leaves: dict[Place, nn.Parameter]) -> Iterator[None]:
        """The block computes with these in the place of its parameters."""
        before = dict(self.places())
        try:
            for (module, name), leaf in leaves.items():
                module._parameters[name] = leaf
            yield
        finally:
            for (module, name), parameter in before.items():
                module._parameters[name] = parameter


class BlockPass:
    """The forward pass of a block on one microbatch, and its backward pass."""

    def __init__(self, block: Block) -> None:
        self.block, self.steps = block, block.steps
        self.recorded = self.steps.recording
        self._forward: Recorder | None = None
        self._backward: Recorder | None = None
        self._inputs: list[Any] = []
        self._leaves: dict[Place, nn.Parameter] = {}
        self._weights: tuple[dict[Place, Tensor], dict[Place, Tensor]] = ({}, {})
        """Memory from which the graphs of both passes read weights that move."""
        self._held: tuple[list[Any], Tensor | None] = ([], None)
        """Memory from which the forward graph reads the inputs, and to which it writes y."""
        self._y: Tensor | None = None
        self._dy: Tensor | None = None
        self._dx: Tensor | None = None
        self._gradients: dict[Place, Tensor] = {}

    def forward(self, x: Tensor, others: Sequence[Any]) -> Tensor:
        """y; x is the block's input, `others` what it takes besides."""
        if self._forward is None:
            return self._first_forward(x, others)
        assert self._y is not None
        for given, held in zip((x, *others), self._inputs, strict=True):
            _fill(held, given)
        self._fill_weights(0)
        self._forward.replay()
        return self._y.detach()

    def backward(self, dy: Tensor) -> Tensor | None:
        """dx; the gradients of the block's parameters are theirs then."""
        if self._backward is None:
            return self._first_backward(dy)
        _fill(self._dy, dy)
        self._fill_weights(1)
        self._backward.replay()
        for (module, name), gradient in self._gradients.items():
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter.grad is None:
                parameter.grad = like(parameter, gradient.detach())
            elif self.steps.moved:
                local(parameter.grad).add_(gradient)
        return None if self._dx is None else self._dx.detach()

    # -- the step that is recorded, and those before it ---------------------------------------------------------------

    def _first_forward(self, x: Tensor, others: Sequence[Any]) -> Tensor:
        block, pool = self.block, self.steps.pool
        if any(isinstance(each, Tensor) and each.requires_grad for each in others):
            raise RuntimeError(f"{type(block.block).__name__} has gradients for other inputs than its first one")

        def work() -> Tensor:
            self._inputs = [self._own(each) for each in (x, *others)]
            self._inputs[0].requires_grad_(x.requires_grad)
            self._leaves = block.stand_ins()
            with block.holding(self._leaves), torch.enable_grad():
                return block.work(*self._inputs)

        if not self.recorded:
            self._y = pool.warm_up(work)
            return self._y.detach()
        recorder = pool.another()
        self._y = y = recorder.record(work)
        self._weights = (self._addresses(), {})
        addresses = [pool.address(each) if isinstance(each, Tensor) else each for each in self._inputs]
        for given, held in zip((x, *others), addresses, strict=True):
            _fill(held, given)
        self._fill_weights(0)
        recorder.replay()
        self._free_weights()
        self._forward, self._held = recorder, (addresses, self.steps.made(y))
        return y.detach()

    def _first_backward(self, dy: Tensor) -> Tensor | None:
        block, pool, y, x = self.block, self.steps.pool, self._y, self._inputs[0]
        recorder = pool.another() if self.recorded else pool
        assert y is not None
        parameters = dict(block.places())

        def work() -> tuple[Tensor, Tensor | None, dict[Place, Tensor]]:
            if self.recorded and self.steps.moved:
                for leaf in self._leaves.values():
                    pool.allocate(leaf)
            own = self._own(dy)
            for place, leaf in self._leaves.items():
                leaf.grad = self._sum_so_far(place, parameters[place])
            with block.holding(self._leaves):  # what is recomputed calls the block again
                torch.autograd.backward(y, own)
            found = {place: leaf.grad for place, leaf in self._leaves.items() if leaf.grad is not None}
            for leaf in self._leaves.values():
                leaf.grad = None
            return own, x.grad, found

        own, dx, gradients = recorder.record(work) if self.recorded else recorder.warm_up(work)
        if self.recorded:
            self._weights = (self._weights[0], self._addresses())
            self._dy = pool.address(own)
            self._dx = None if dx is None else self.steps.made(dx)
            self._gradients = {place: self.steps.made(each) for place, each in gradients.items()}
            _fill(self._dy, dy)
            self._fill_weights(1)
            recorder.replay()
            self._free_weights()
            self._backward = recorder
            self._inputs, self._y = self._held
        for place, gradient in gradients.items():
            parameter = parameters[place]
            if parameter.grad is None:
                parameter.grad = like(parameter, gradient)
            elif local(parameter.grad) is not gradient:
                local(parameter.grad).add_(gradient)
        self._leaves = {}
        return dx

    def _own(self, given: Any) -> Any:
        """`given` as the graph reads it."""
        if not isinstance(given, Tensor):
            return given
        if not self.recorded or self.steps.holds(given):
            return given.detach()
        return torch.empty_like(given, requires_grad=False)

    def _sum_so_far(self, place: Place, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that the graph adds to."""
        if self.steps.moved or parameter.grad is None:
            return None
        total = local(parameter.grad)
        if self.recorded and not self.steps.holds(total):
            raise RuntimeError(f"{type(place[0]).__name__}.{place[1]} has a gradient from outside of its block as well")
        return total

    def _addresses(self) -> dict[Place, Tensor]:
        if not self.steps.moved:
            return {}
        return {place: self.steps.pool.address(leaf) for place, leaf in self._leaves.items()}

    def _fill_weights(self, which: int) -> None:
        for (module, name), held in self._weights[which].items():
            parameter = module._parameters[name]
            assert parameter is not None
            held.copy_(local(parameter).detach())

    def _free_weights(self) -> None:
        if self.steps.moved:
            for leaf in self._leaves.values():
                self.steps.pool.free(leaf)


class _PassFunction(torch.autograd.Function):
    """y of (x, a scalar that has a gradient even where x has none, pass, the block's other arguments)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, one: BlockPass, others: tuple[Any, ...]) -> Tensor:
        ctx.one = one
        return one.forward(x, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.one.backward(dy), None, None, None


def _fill(held: Any, given: Any) -> None:
    """Put `given` where a graph reads it; what is no tensor must be what it was when it was recorded."""
    if isinstance(held, Tensor):
        if held.shape != given.shape or held.dtype != given.dtype:
            raise RuntimeError(
                f"a block got {tuple(given.shape)} {given.dtype}, and its graph reads {tuple(held.shape)}"
            )
        if held.data_ptr() != given.data_ptr():
            held.copy_(given.detach())
    elif held is not given and held != given:
        raise RuntimeError(f"a block got {given!r}, and its graph was recorded with {held!r}")
