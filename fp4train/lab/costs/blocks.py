"""What a block reads, writes and keeps for backward, from the shapes of one pass on the meta
device.

A block of the real model runs forward and backward once, on tensors without memory, and each
operation is counted as it is called: the bytes of its inputs and results, and its arithmetic where
it is a product (a scan's) or a Fourier transform. What GPUs run as one kernel stands in for itself:
it reads its inputs and writes its results once, and keeps what the kernel keeps:

    planned layer        nothing is read or written, which `rows.py` charges; x is kept for wgrad:
                         q(xᵀ) as packed codes and scales, or in high precision
    attention            arithmetic alone; keeps q, k, v, the output and a float32 log-sum-exp per
                         row (FlashAttention, arXiv:2205.14135)
    RMSNorm              keeps its input, and a float32 factor per row
    Liger's kernels      where they run (`models/common/liger.py`)
    norms and gates that quantise their results (`nn/normed_linears.py`): those of forward count as
                         quantising; here only the sum that a norm is of, and a norm's backward pass

So a new model family needs no formula here. Of the tensors that autograd keeps each storage is
counted once. Weights are not counted: `memory.py` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp4train.lab.costs.rows import shares_x
from fp4train.lab.costs.stand_ins import (
    FunctionStandIns,
    KernelStandIns,
    LayerStandIn,
    PassWork,
    WorkCounter,
    norm_by_backend,
    norm_in_kernels,
)
from fp4train.models.common.operators import Fusible
from fp4train.models.common.stream import StreamNorm, StreamTerms, summed
from fp4train.precision.context import Context, use
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.recipe import Recipe
from fp4train.quantize import Operand
from fp4train.quantize.source import Source
from fp4train.run.produced import ProducedNorms


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block and one microbatch, before any splitting.

    Args:
        forward, backward: work of the operations between the products.
        saved: bytes kept for backward.
        routed: part of `saved` that every tensor-parallel rank has of all tokens: the input of a
            router.
        unsplit: part of `saved` that tensor parallelism without sequence parallelism repeats on
            every rank: tensors of the residual stream and the inputs of column-wise split layers.
        input: bytes of the residual stream: the block's input, or what a pipeline stage sends.
    """

    forward: PassWork
    backward: PassWork
    saved: float
    routed: float
    unsplit: float
    input: float


BACKWARD_OF_ATTENTION: Final = 2.5
"""Floating-point operations of attention's backward pass over those of its forward pass: five
products instead of two."""


def measure_blocks(
    model: nn.Module,
    plans: Mapping[str, LayerPlan],
    recipe: Recipe,
    tokens: Tensor,
    *,
    row_wise: Collection[str] = (),
    compiled: bool = False,
    liger: bool = False,
    produced: ProducedNorms | None = None,
) -> list[BlockCost]:
    """The cost of every block of `model` (on the meta device), for a microbatch.

    Blocks with equal plans and parameters are measured once, and have one object.

    Args:
        plans: plan of each linear layer, by name.
        tokens: token ids of the microbatch, [sequences, seq_len], on the meta device.
        row_wise: layers whose inputs tensor parallelism splits, not their outputs.
        compiled: whether torch.compile has the blocks: layers do not share what they keep.
        liger: whether Liger's kernels run what they can.
        produced: norms and gates that quantise their results.
    """
    norms = produced or ProducedNorms({}, {})
    names = {module: name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    inputs = _block_inputs(model, blocks, recipe, tokens)
    measured: dict[object, tuple[BlockCost, bool]] = {}
    costs: list[BlockCost] = []
    hands_on = False
    by_fp4train = {part for part, producer in norms.producers.items() if not producer.by_backend}
    adding = [liger or not by_fp4train.isdisjoint(block.modules()) for block in blocks]

    def relative(part: nn.Module) -> str:
        return str(names[part].removeprefix(names[block]))

    for block, adds, after in zip(blocks, adding, [*adding[1:], False], strict=True):
        begins = hands_on and adds
        ends = not after
        layers = {part: plans[names[part]] for part in block.modules() if names[part] in plans}
        producing = [part for part in block.modules() if part in norms.producers]
        key = (
            type(block),
            tuple((name, parameter.shape) for name, parameter in block.named_parameters()),
            tuple((relative(part), plan.products) for part, plan in layers.items()),
            tuple((relative(part), norms.producers[part].by_backend) for part in producing),
            (begins, ends),
        )
        if key not in measured:
            run = _MetaRun(layers, row_wise, compiled)
            run.kernels_of(block, liger, norms)
            measured[key] = run.measure(block, inputs[block], recipe, begins=begins, ends=ends)
        cost, hands_on = measured[key]
        costs.append(next((earlier for earlier in costs if earlier == cost), cost))
    return costs


def _block_inputs(
    model: nn.Module, blocks: Sequence[nn.Module], recipe: Recipe, tokens: Tensor
) -> dict[nn.Module, tuple[Any, ...]]:
    """Arguments that the model calls each block with, where every block passes its input on."""
    inputs: dict[nn.Module, tuple[Any, ...]] = {}

    def pass_on(block: nn.Module, x: Tensor, *more: Any) -> Tensor:
        inputs[block] = (x, *more)
        return x

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_replaced(block, "forward", partial(pass_on, block)))
        stack.enter_context(use(Context(recipe=recipe)))
        stack.enter_context(torch.no_grad())
        model(tokens)
    return inputs


@contextmanager
def _replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """A module with another attribute for a while."""
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]


class _MetaRun:
    """One pass of a block each way, counted."""

    def __init__(
        self,
        layers: Mapping[nn.Module, LayerPlan],
        row_wise: Collection[str],
        compiled: bool,
    ) -> None:
        self.counter = WorkCounter()
        self._sharing = not compiled
        self._layers = layers
        self._row_wise = row_wise
        self._given: frozenset[nn.Module] = frozenset()
        self._replaced: list[tuple[nn.Module, str, object]] = [
            (layer, "forward", partial(self._layer, layer, plan)) for layer, plan in layers.items()
        ]
        self._repeated: set[int] = set()
        self._last_codes: tuple[int, Source, Tensor] | None = None

    def kernels_of(
        self,
        block: nn.Module,
        liger: bool,
        norms: ProducedNorms,
    ) -> None:
        """Have kernels run norms, gates and rotations of the block."""
        readers: list[nn.Module] = []
        for part in block.modules():
            producer = norms.producers.get(part)
            if isinstance(part, Fusible) and (liger or producer is not None):
                kernels = KernelStandIns(self.counter, quantise=producer is not None)
                self._replaced.append((part, "operators", kernels))
            if producer is None:
                continue
            readers += producer.readers
            if isinstance(part, StreamNorm):
                if producer.by_backend:
                    stand_in = norm_by_backend
                else:
                    stand_in = norm_in_kernels
                self._replaced.append((part, "of_stream", partial(stand_in, self.counter)))
        self._given = frozenset(readers)

    def measure(
        self,
        block: nn.Module,
        inputs: tuple[Any, ...],
        recipe: Recipe,
        *,
        begins: bool,
        ends: bool,
    ) -> tuple[BlockCost, bool]:
        """(The cost of the block, whether it hands on a `StreamTerms`).

        Args:
            begins: whether a kernel of its first norm makes the last sum of the block before.
            ends: whether torch makes its own last sum.
        """
        x = inputs[0].detach().clone().requires_grad_()
        if begins:
            stream = StreamTerms(x, x.detach().clone())  # whose gradient is that of x
        else:
            stream = x
        not_kept = {_storage(value) for value in inputs[1:] if isinstance(value, Tensor)}
        not_kept |= {_storage(parameter) for parameter in block.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in not_kept:
                kept[_storage(tensor)] = tensor
            return tensor

        context = Context(recipe=recipe)
        counter = self.counter
        with ExitStack() as stack:
            for part, name, value in self._replaced:
                stack.enter_context(_replaced(part, name, value))
            stack.enter_context(use(context))
            stack.enter_context(FunctionStandIns(counter))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counter:
                y = block(stream, *inputs[1:])
                hands_on = isinstance(y, StreamTerms)
                y = summed(y) if ends else y
            forward = counter.work
            counter.work = PassWork(attention=BACKWARD_OF_ATTENTION * forward.attention)
            with counter:
                results = list(y) if isinstance(y, StreamTerms) else [y]
                torch.autograd.backward(results, [torch.empty_like(result) for result in results])
        block.zero_grad(set_to_none=True)
        return self._cost(x, kept, forward, counter.work), hands_on

    def _cost(
        self,
        x: Tensor,
        kept: Mapping[int, Tensor],
        forward: PassWork,
        backward: PassWork,
    ) -> BlockCost:
        *rows, width = x.shape
        stream_shapes = ((*rows, 1), (*rows, width))
        of_stream = {key for key, tensor in kept.items() if tuple(tensor.shape) in stream_shapes}
        repeated = of_stream | (self._repeated & kept.keys())
        routed: set[int] = set()
        if any(plan.layer.experts for plan in self._layers.values()):
            matrix = (math.prod(rows), width)
            wide = {key: tensor for key, tensor in kept.items() if tensor.dtype == torch.float32}
            routed = {
                key for key, tensor in wide.items() if tuple(tensor.shape) == matrix
            } - repeated
        sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}
        return BlockCost(
            forward=forward,
            backward=backward,
            saved=sum(sizes.values()),
            routed=sum(sizes[key] for key in routed),
            unsplit=sum(sizes[key] for key in repeated),
            input=x.untyped_storage().nbytes(),
        )

    def _layer(self, layer: nn.Module, plan: LayerPlan, x: Tensor, *counts: object) -> Tensor:
        """Stand in for a linear layer, or for experts with the `counts` of their rows."""
        parts = [
            (part.sources["wgrad", "x"], part.layer.in_features) for part in plan.channel_parts
        ]
        if len(parts) == 1 and parts[0][0].codes is None:
            kept = x.to(plan.table.torch_dtype)
        else:
            kept = self._codes(x, parts, plan, layer in self._given)
        if not plan.layer.experts and plan.layer.name not in self._row_wise:
            self._repeated.add(_storage(kept))
        y: Tensor = LayerStandIn.apply(x, kept, plan.layer.out_features)  # type: ignore[no-untyped-call]
        return y

    def _codes(
        self,
        x: Tensor,
        parts: list[tuple[Operand, int]],
        plan: LayerPlan,
        in_any_case: bool,
    ) -> Tensor:
        """Codes or values of so many channels of x each, as bytes; layers with one spec for all
        share them, those of norms and gates in any case."""
        whole_layer = plan.layer_backend is not None
        shares = in_any_case or not whole_layer or (len(plan.readers) > 1 and shares_x(plan))
        shares = shares and self._sharing and len(parts) == 1
        key = (_storage(x), parts[0][0].source)
        if shares and self._last_codes is not None and self._last_codes[:2] == key:
            return self._last_codes[2]
        tokens = x.shape[:-1].numel()
        wide = plan.table.torch_dtype.itemsize
        size = sum(operand.bytes(tokens, channels, wide) for operand, channels in parts)
        codes = torch.empty(math.ceil(size), dtype=torch.uint8, device="meta")
        if len(parts) == 1:
            self._last_codes = (*key, codes)
        return codes


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
