"""What a block reads, writes and keeps for backward, from one pass of it on the meta device.

A block of the real model runs forward and backward once, on tensors without memory, and each
operation is counted as it is called: the bytes of its inputs and results, and its arithmetic where
it is a product (a scan's) or a Fourier transform. What GPUs run as one kernel stands in for itself:

    planned layer        nothing is read or written, which `rows.py` charges; it keeps
                         `saved_bytes` for backward
    attention            arithmetic alone; keeps q, k, v, the output and a float32 log-sum-exp per
                         row (FlashAttention, arXiv:2205.14135)
    RMSNorm, and what Liger's kernels run (`models/common/liger.py`): bytes of one kernel each way

So a new model family needs no formula here. Of the tensors that autograd keeps each storage is
counted once. Weights are not counted: `memory.py` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fp4train.models.common.liger import MOVED, Liger
from fp4train.models.common.operators import Fusible
from fp4train.precision.context import Context, use
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.recipe import Recipe

BACKWARD_OF_ATTENTION: Final = 2.5
"""Floating-point operations of attention's backward pass over those of its forward pass: five
products instead of two."""

SUM_BYTES: Final = 6
"""Bytes per BF16 element of a sum of two tensors."""


@dataclass(kw_only=True)
class PassWork:
    """What the operations between the products of one pass take, before any splitting.

    Args:
        operators: bytes that operators read and write, each by itself.
        kernels: bytes that kernels of several operations read and write.
        flops: floating-point operations of products and Fourier transforms, in float32.
        attention: floating-point operations of attention, half of the square if causal.
        launches: kernels that the host queues.
    """

    operators: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0
    attention: float = 0.0
    launches: int = 0

    def add_kernel(self, moved: float) -> None:
        """Count a kernel that moves so many bytes; 0: it is counted elsewhere."""
        self.kernels += moved
        self.launches += moved > 0


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block and one microbatch, before any splitting.

    Args:
        forward, backward: work of the operations between the products.
        saved: bytes kept for backward.
        unsplit: part of `saved` that tensor parallelism without sequence parallelism repeats on
            every rank: tensors of the width of the residual stream.
        input: bytes of the residual stream: the block's input, or what a pipeline stage sends.
    """

    forward: PassWork
    backward: PassWork
    saved: float
    unsplit: float
    input: float


def saved_bytes(plan: LayerPlan, tokens: int) -> float:
    """Bytes of x that a planned layer keeps for wgrad: packed codes and scales, or values in high
    precision.
    """
    itemsize = plan.table.torch_dtype.itemsize
    return sum(
        part.sources["wgrad", "x"].bytes(tokens, part.layer.in_features, itemsize)
        for part in plan.channel_parts
    )


def measure_blocks(
    model: nn.Module,
    plans: Mapping[str, LayerPlan],
    recipe: Recipe,
    tokens: Tensor,
    *,
    liger: bool = False,
) -> tuple[list[BlockCost], list[int]]:
    """The costs of the distinct blocks of `model` (on the meta device), for a microbatch, and the
    index of that of each block. Blocks with equal plans and parameters cost the same.

    Args:
        plans: plan of each linear layer, by name.
        tokens: token ids of the microbatch, [sequences, seq_len], on the meta device.
        liger: whether Liger's kernels run what they can.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    distinct: dict[object, int] = {}
    costs: list[BlockCost] = []
    order: list[int] = []

    def measure(block: nn.Module, x: Tensor, *more: Any) -> Tensor:
        layers = {part: plans[names[part]] for part in block.modules() if names[part] in plans}
        key = (
            type(block),
            tuple((name, parameter.shape) for name, parameter in block.named_parameters()),
            tuple(plan.products for plan in layers.values()),
        )
        if key not in distinct:
            distinct[key] = len(costs)
            with torch.enable_grad():
                costs.append(_measure(block, (x, *more), layers, recipe, liger=liger))
        order.append(distinct[key])
        return x

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_replaced(block, "forward", partial(measure, block)))
        stack.enter_context(use(Context(recipe=recipe)))
        stack.enter_context(torch.no_grad())
        model(tokens)
    return costs, order


@contextmanager
def _replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """A module with another attribute for a while."""
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]


def _measure(
    block: nn.Module,
    inputs: tuple[Any, ...],
    layers: Mapping[nn.Module, LayerPlan],
    recipe: Recipe,
    *,
    liger: bool,
) -> BlockCost:
    """The cost of one block, called with `inputs`."""
    x = inputs[0].detach().clone().requires_grad_()
    not_kept = {_storage(value) for value in inputs[1:] if isinstance(value, Tensor)}
    not_kept |= {_storage(parameter) for parameter in block.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in not_kept:
            kept[_storage(tensor)] = tensor
        return tensor

    counter = _WorkCounter()
    stand_ins = _StandIns(counter)
    with ExitStack() as stack:
        for layer, plan in layers.items():
            stack.enter_context(_replaced(layer, "forward", partial(stand_ins.layer, plan)))
        for part in block.modules():
            if liger and isinstance(part, Fusible):
                stack.enter_context(_replaced(part, "operators", stand_ins))
        stack.enter_context(use(Context(recipe=recipe)))
        stack.enter_context(stand_ins)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            result = type(block).forward(block, x, *inputs[1:])
        # A block may return the terms of the stream, which the next norm adds up.
        terms = [result] if isinstance(result, Tensor) else list(result)
        for term in terms[1:]:
            counter.work.add_kernel(SUM_BYTES / 2 * term.itemsize * term.numel())
        forward = counter.work
        counter.work = PassWork(attention=BACKWARD_OF_ATTENTION * forward.attention)
        with counter:
            torch.autograd.backward(terms, [torch.empty_like(term) for term in terms])
    block.zero_grad(set_to_none=True)
    sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}
    repeated = [key for key, tensor in kept.items() if tensor.shape == x.shape]
    return BlockCost(
        forward=forward,
        backward=counter.work,
        saved=sum(sizes.values()),
        unsplit=sum(sizes[key] for key in repeated),
        input=x.untyped_storage().nbytes(),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of operators; views and allocations have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = PassWork()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        out = func(*args, **keywords)
        if func.is_view or "empty" in str(func):
            return out
        self.work.launches += 1
        self.work.operators += _bytes(tree_leaves((args, keywords, out)))
        arithmetic = flop_registry.get(func.overloadpacket)
        if arithmetic is not None:
            self.work.flops += arithmetic(*args, **keywords, out_val=out)
        elif func.overloadpacket in _FOURIER_TRANSFORMS:
            self.work.flops += _transform_flops(args[0], out, args[1])
        return out


_FOURIER_TRANSFORMS = (torch.ops.aten._fft_r2c, torch.ops.aten._fft_c2r)


def _transform_flops(x: Tensor, out: Tensor, axes: Sequence[int]) -> float:
    """Floating-point operations of a Fourier transform of n real values: 2.5·n·log₂n."""
    real = out if x.is_complex() else x
    length = math.prod(real.shape[axis] for axis in axes)
    return 2.5 * real.numel() * math.log2(max(2, length))


def _bytes(values: Sequence[Any]) -> float:
    """Bytes of the tensors among the values; expanded ones have those of their storage."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


class _Kernel(torch.autograd.Function):
    """A kernel that is counted instead of run.

    Args of `forward`:
        moved: bytes that it moves forward and backward.
        results: tensors that it returns, without values.
        kept: tensors that it keeps for backward.
        inputs: tensors that get gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        counter: _WorkCounter,
        moved: tuple[float, float],
        results: Sequence[Tensor],
        kept: Sequence[Tensor],
        *inputs: Tensor,
    ) -> Any:
        ctx.save_for_backward(*kept)
        ctx.counter = counter
        ctx.moved = moved[1]
        ctx.inputs = inputs
        counter.work.add_kernel(moved[0])
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counter.work.add_kernel(ctx.moved)
        return None, None, None, None, *(torch.empty_like(x) for x in ctx.inputs)


class _StandIns(Liger, TorchFunctionMode):
    """What GPUs run as one kernel each: planned layers, attention, norms and Liger's kernels."""

    def __init__(self, counter: _WorkCounter) -> None:
        TorchFunctionMode.__init__(self)
        self._run: Any = partial(_Kernel.apply, counter)
        self._work = counter
        self._codes: dict[object, Tensor] = {}

    def layer(self, plan: LayerPlan, x: Tensor, *counts: object) -> Any:
        """A linear layer, or experts with the `counts` of their rows; layers of one x share what
        they keep of it.
        """
        source = plan.sources["wgrad", "x"]
        if source.codes is None:
            kept = x.to(plan.table.torch_dtype)
        else:
            size = math.ceil(saved_bytes(plan, x.shape[:-1].numel()))
            codes = torch.empty(size, dtype=torch.uint8, device="meta")
            kept = self._codes.setdefault((_storage(x), source.codes), codes)
        y = x.new_empty((*x.shape[:-1], plan.layer.out_features))
        return self._run((0, 0), [y], [kept], x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is F.rms_norm:
            return self.rms_norm(args[0])
        if func is not F.scaled_dot_product_attention:
            return func(*args, **keywords)
        q, k, v = args[:3]
        batch, heads, time, width = q.shape
        products = 2 if keywords.get("is_causal") else 4
        self._work.work.attention += products * batch * heads * time**2 * width
        # The layout of the kernels: heads of a token lie side by side.
        out = q.new_empty((batch, time, heads, v.shape[-1])).transpose(1, 2)
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return self._run((0, 0), [out], [q, k, v, out, sums], q, k, v)

    def _liger(
        self, name: str, results: Sequence[Tensor], kept: Sequence[Tensor], *inputs: Tensor
    ) -> Any:
        """A kernel of `MOVED`."""
        elements = inputs[0].numel()
        if name == "rotate":
            elements += inputs[1].numel()
        forward, backward = (inputs[0].itemsize / 2 * elements * moved for moved in MOVED[name])
        return self._run((forward, backward), results, kept, *inputs)

    def rms_norm(self, x: Tensor, *_: object) -> Any:
        return self._liger("rms_norm", [torch.empty_like(x)], [x], x)

    def add_rms_norm(self, x: Tensor, change: Tensor, *_: object) -> Any:
        total = torch.empty_like(x)
        return self._liger("add_rms_norm", [torch.empty_like(x), total], [total], x, change)

    def silu_product(self, gate: Tensor, up: Tensor) -> Any:
        return self._liger("silu_product", [torch.empty_like(gate)], [gate, up], gate, up)

    def rotate(self, q_BHTE: Tensor, k_BHTE: Tensor, *_: object) -> Any:
        rotated = [torch.empty_like(q_BHTE), torch.empty_like(k_BHTE)]
        return self._liger("rotate", rotated, [], q_BHTE, k_BHTE)
