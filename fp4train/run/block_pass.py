"""A block of a model whose passes are recorded as CUDA graphs, and its passes on one microbatch (`block_graph.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import local
from fp4train.precision.context import recompute_eagerly
from fp4train.run.step_graph import Recorder
from fp4train.shards import like

if TYPE_CHECKING:
    from fp4train.run.block_graph import RecordedBlocks

Place = tuple[nn.Module, str]
"""A module and the name of a parameter of it."""
BlockPart = tuple[str, tuple[str, ...]]
"""A method of a block that is recorded, and the modules that it runs, "" for all; none: the host runs it."""


def block_parts(block: nn.Module) -> tuple[BlockPart, ...]:
    """The methods of a block of which each is recorded by itself or left to the host: those that the block names in
    `fp4train_recorded`, which together are its forward pass; else that. A pass with experts is the host's, which reads
    how many rows each of them has.
    """
    experts = any(isinstance(each, PlannedLayer) and each.layer.experts for each in block.modules())
    found: tuple[BlockPart, ...] = getattr(block, "fp4train_recorded", (("forward", () if experts else ("",)),))
    return found


class Block:
    """A block of the model, or a part of one, in the place of its method.

    Args:
        method, recorded: see `BlockPart`.
        compiled: whether torch.compile has the method.
    """

    def __init__(
        self, steps: RecordedBlocks, block: nn.Module, method: str, recorded: Iterable[str], *, compiled: bool
    ) -> None:
        self.steps, self.block = steps, block
        self.recorded = [block.get_submodule(name) for name in recorded]
        inner: Callable[..., Tensor] = getattr(block, method)
        self.inner, self.compiled = torch.compile(inner) if compiled else inner, compiled
        self.calls = 0
        """Forward passes so far in this step."""
        self.passes: list[BlockPass] = []
        """Passes that are recorded."""
        self.leaves: dict[Place, nn.Parameter] | None = None
        """Stand-ins of parameters at places that do not move."""
        setattr(block, method, self)

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        """y of the block's forward pass; eagerly outside of steps, and without gradients."""
        steps = self.steps
        if not steps.running or not torch.is_grad_enabled():
            return self.inner(x, *others)
        if not self.recorded:
            return self.work(x, *others)
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
        """The forward pass."""
        return recompute_eagerly(self._run, *inputs) if self.steps.recomputed else self._run(*inputs)

    def _run(self, *inputs: Any) -> Tensor:
        """The method, of which nothing is compiled while it is recorded."""
        fixed = self.compiled and self.steps.recording and self.recorded
        with torch.compiler.set_stance("fail_on_recompile") if fixed else nullcontext():
            return self.inner(*inputs)

    def places(self) -> Iterator[tuple[Place, nn.Parameter]]:
        """The block's parameters, as they are now."""
        for module in (each for part in self.recorded for each in part.modules()):
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
