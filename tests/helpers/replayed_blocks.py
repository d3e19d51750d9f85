"""Recorded blocks of a model (`train.cuda_graph=block`) whose graphs do nothing: what the host does and queues around
them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp4train.models.llama import Llama
from fp4train.nn import convert
from fp4train.precision import BF16, Recipe
from fp4train.precision.context import Context, use
from fp4train.run.block_graph import RecordedBlocks
from fp4train.run.block_pass import BlockPass


class EmptyGraphs:
    """A `Recorder` of `fp4train.run.step_graph` whose graphs hold nothing."""

    def __init__(self) -> None:
        self.replays = 0

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any]) -> Any:
        """What would be filled before a replay is zero."""
        with patch.object(torch, "empty_like", torch.zeros_like):
            return work()

    def replay(self) -> None:
        self.replays += 1

    def another(self) -> "EmptyGraphs":
        return self

    def address(self, tensor: Tensor) -> Tensor:
        return tensor.data

    def allocate(self, tensor: Tensor) -> None:
        """It was never freed."""

    def free(self, tensor: Tensor) -> None:
        """It stays."""


def small_llama() -> "ReplayedBlocks":
    """Eight blocks of nine parameters."""
    shape = Llama(width=64, layers=8, heads=2, kv_heads=1, hidden=64)
    model = convert(shape.build(vocab_size=32, seq_len=16), backend="emulate")
    return ReplayedBlocks(model, torch.zeros(1, 16, dtype=torch.int64), BF16())


class _Operators(TorchDispatchMode):
    """Operators that are no views, with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.calls.append((function.overloadpacket.__name__, out))
        return out

    def within(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*inputs: Any) -> Any:
            with self:
                return method(*inputs)

        return seen


class ReplayedBlocks:
    """The blocks of a converted model one after the other, on `tokens` [B, T], recorded.

    Args:
        microbatches: of a step. moved: whether the weights' memory moves, as it does on data ranks.
    """

    def __init__(
        self, model: nn.Module, tokens: Tensor, recipe: Recipe, *, microbatches: int = 1, moved: bool = False
    ) -> None:
        self.model, self.microbatches, self.graphs = model, microbatches, EmptyGraphs()
        self.passes = 2 * len(cast(Any, model.blocks)) * microbatches
        self._context = Context(recipe=recipe, seed=0, step=1)
        blocks: Any = model.blocks
        given: list[tuple[Any, ...]] = []
        hooks = [block.register_forward_pre_hook(lambda _, inputs: given.append(inputs)) for block in blocks]
        with torch.no_grad(), use(self._context):
            model(tokens)
        for hook in hooks:
            hook.remove()
        self._calls = [(block, others) for block, (_, *others) in zip(blocks, given, strict=True)]
        self._x = given[0][0]
        world, train = SimpleNamespace(data_mesh=None), SimpleNamespace(compile=False)
        run: Any = SimpleNamespace(
            config=SimpleNamespace(train=train), model=model, world=world, device=torch.device("cpu"), counters=None
        )
        self._steps = RecordedBlocks(run, lambda _: self.graphs)
        self._steps.moved, self._steps._recorder = moved, self.graphs
        self.step(recording=True)

    def step(self, *, recording: bool = False) -> None:
        """Forward and backward of every microbatch."""
        for block in self._steps.blocks:
            block.calls = 0
        with self._steps._blocks_run():
            self._steps.recording = recording
            for _ in range(self.microbatches):
                y = self._x.clone().requires_grad_()
                with use(self._context):
                    for block, others in self._calls:
                        y = block(y, *others)
                y.backward(torch.ones_like(y))
        self.model.zero_grad(set_to_none=True)

    def queued(self) -> tuple[int, list[tuple[str, Tensor]]]:
        """(Graphs that a step replays, operators that its passes queue beside them with their results)."""
        before, found = self.graphs.replays, _Operators()
        methods = {name: found.within(getattr(BlockPass, name)) for name in ("forward", "backward")}
        with patch.multiple(BlockPass, **methods):
            self.step()
        return self.graphs.replays - before, found.calls
