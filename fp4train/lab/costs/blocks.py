"""What a block reads, writes and keeps for backward, from one pass of it on the meta device.

A block of the real model runs forward and backward once, on tensors without memory, and each
operation is counted as it is called: the bytes of its inputs and results, and its arithmetic where
it is a product (a scan's). What GPUs run as one kernel stands in for itself:

    planned layer        nothing is read or written, which `rows.py` charges; it keeps
                         `saved_bytes` for backward
    attention            arithmetic alone; keeps q, k, v, the output and a float32 log-sum-exp per
                         row (FlashAttention, arXiv:2205.14135)
    RMSNorm, and what Liger's kernels run (`models/common/liger.py`): inputs and results, forward;
                         what it keeps and the gradients of both, backward

So a new model family needs no formula here. Of the tensors that autograd keeps each storage is
counted once. Weights are not counted: `memory.py` counts them.
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fp4train.errors import UserError
from fp4train.lab.costs.weights import ModelWeight
from fp4train.models.common import operators
from fp4train.models.common.liger import Liger
from fp4train.precision.context import Context, use
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.recipe import Recipe

BACKWARD_OF_ATTENTION = 2.5
"""Floating-point operations of attention's backward pass over those of its forward pass: five
products instead of two."""


@dataclass(kw_only=True)
class PassWork:
    """What the operations between the products of one pass take, before any splitting.

    Args:
        operators: bytes that operators read and write, each by itself.
        kernels: bytes that kernels of several operations read and write.
        flops: floating-point operations of products, in float32.
        attention: floating-point operations of attention, half of the square if causal.
        keys: bytes of the keys and values of attention.
    """

    operators: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0
    attention: float = 0.0
    keys: float = 0.0


def saved_bytes(plan: LayerPlan, tokens: int) -> float:
    """Bytes of x that a planned layer keeps for wgrad: packed codes and scales, or values in high
    precision.
    """
    itemsize = plan.table.torch_dtype.itemsize
    if plan.keeps_values:
        spec = plan.sources["wgrad", "x"].spec
        return tokens * plan.layer.in_features * (2.0 if spec and spec.exact_in_bf16 else 4.0)
    return sum(
        part.sources["wgrad", "x"].bytes(tokens, part.layer.in_features, itemsize)
        for part in plan.channel_parts
    )


def _storage(value: object) -> object:
    """The identity of a tensor's memory."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _bytes(values: Iterable[Any]) -> float:
    """Bytes of the tensors among the values; expanded ones have those of their storage."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of a block's operators; views and allocations have none. Layers that read
    one x keep its codes once: `codes`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = PassWork()
        self.codes: dict[object, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        out = func(*args, **keywords)
        if func.is_view or "empty" in str(func):
            return out
        self.work.operators += _bytes(tree_leaves((args, keywords, out)))
        if arithmetic := flop_registry.get(func.overloadpacket):
            self.work.flops += arithmetic(*args, **keywords, out_val=out)
        return out


class _Kernel(torch.autograd.Function):
    """A kernel that is counted instead of run.

    Args of `forward`:
        counter: a `_WorkCounter` of the bytes of both passes; a new one where they are counted
            elsewhere.
        results: tensors that it returns, without values.
        kept: tensors that it keeps for backward.
        inputs: tensors that get gradients.
    """

    @staticmethod
    def forward(ctx: Any, counter: Any, results: Any, kept: Any, *inputs: Tensor) -> Any:
        ctx.save_for_backward(*kept)
        ctx.counter = counter
        ctx.inputs = inputs
        counter.work.kernels += _bytes((*inputs, *results))
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counter.work.kernels += _bytes((*gradients, *ctx.saved_tensors, *ctx.inputs))
        return None, None, None, *map(torch.empty_like, ctx.inputs)


_RUN: Any = _Kernel.apply


class _Kernels(Liger, TorchFunctionMode):
    """What GPUs run as one kernel each: planned layers, attention, norms and Liger's kernels."""

    def __init__(self) -> None:
        TorchFunctionMode.__init__(self)
        self.counter = _WorkCounter()

    def layer(self, plan: LayerPlan, out_features: int, x: Tensor, *counts: object) -> Any:
        """A linear layer, of a part of which this is the plan, or experts with the `counts` of
        their rows; layers of one x share what they keep of it.
        """
        source = plan.sources["wgrad", "x"]
        if source.codes is None:
            kept = x.to(plan.table.torch_dtype)
        else:
            parts = x.shape[-1] / plan.layer.in_features
            size = math.ceil(parts * saved_bytes(plan, x.shape[:-1].numel()))
            codes = torch.empty(size, dtype=torch.uint8, device="meta")
            kept = self.counter.codes.setdefault((_storage(x), source.codes), codes)
        y = x.new_empty((*x.shape[:-1], out_features))
        return _RUN(_WorkCounter(), [y], [kept], x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is F.rms_norm:
            return self.rms_norm(args[0])
        if func is not F.scaled_dot_product_attention:
            return func(*args, **keywords)
        q, k, v = args[:3]
        batch, heads, time, width = q.shape
        products = 2 if keywords.get("is_causal") else 4
        self.counter.work.keys += _bytes((k, v))
        self.counter.work.attention += products * batch * heads * time**2 * width
        # The layout of the kernels: heads of a token lie side by side.
        out = q.new_empty((batch, time, heads, v.shape[-1])).transpose(1, 2)
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return _RUN(_WorkCounter(), [out], [q, k, v, out, sums], q, k, v)

    def rms_norm(self, x: Tensor, *_: object) -> Any:
        return _RUN(self.counter, [torch.empty_like(x)], [x], x)

    def silu_product(self, gate: Tensor, up: Tensor) -> Any:
        return _RUN(self.counter, [torch.empty_like(gate)], [gate, up], gate, up)

    def rotate(self, q_BHTE: Tensor, k_BHTE: Tensor, *_: object) -> Any:
        rotated = [torch.empty_like(q_BHTE), torch.empty_like(k_BHTE)]
        return _RUN(self.counter, rotated, [], q_BHTE, k_BHTE)


class BlockCost:
    """A block, and all that are like it, for one microbatch before any splitting: measured in a
    pass of it.

    Args:
        weights: weights of the first such block.
        inputs: arguments of its call; the first is the residual stream.

    Raises:
        UserError: the first is no stream of activations.
    """

    def __init__(
        self, block: nn.Module, weights: list[ModelWeight], kernels: _Kernels, *inputs: Any
    ) -> None:
        x, *arguments = inputs
        if not x.is_floating_point():
            raise UserError(
                f"the time of {type(block).__name__} cannot be estimated: it takes {x.dtype}, no "
                "activations. A step is estimated by the blocks of its model, a list of modules "
                "that hold linear layers or what fp4train_blocks names (docs/plugins.md); leave "
                "gpu out to see the plan alone"
            )
        x = x.detach().clone().requires_grad_()
        kept: dict[object, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[_storage(tensor)] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        counter = kernels.counter = _WorkCounter()
        with torch.enable_grad(), hooks, kernels, counter:
            outputs = tree_leaves(type(block).forward(block, x, *arguments))
        self.forward = counter.work
        """Work of the operations between the products, forward."""
        self.backward = PassWork(attention=BACKWARD_OF_ATTENTION * self.forward.attention)
        """Work of the operations between the products, backward."""
        counter.work = self.backward
        with counter:
            torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
        kernels.counter = _WorkCounter()  # what follows the block is none of its work
        for tensor in (*arguments, *block.parameters()):
            kept.pop(_storage(tensor), None)
        sizes = [(tensor.untyped_storage().nbytes(), tensor.shape) for tensor in kept.values()]
        self.saved = sum(size for size, _ in sizes)
        """Bytes kept for backward."""
        self.unsplit = sum(size for size, shape in sizes if shape == x.shape)
        """Part of `saved` that tensor parallelism without sequence parallelism repeats on every
        rank: tensors of the width of the residual stream."""
        self.input = _bytes([x])
        """Bytes of the residual stream: the block's input."""
        self.weights = weights


def measure_blocks(
    model: nn.Module, weights: list[ModelWeight], recipe: Recipe, tokens: Tensor, *, liger: bool
) -> list[BlockCost]:
    """The costs of the blocks of `model` (on the meta device), for a microbatch. Blocks with equal
    plans and parameters have one.

    Args:
        weights: weights of the model, with the plans of its layers.
        tokens: token ids of the microbatch, [sequences, seq_len], on the meta device.
        liger: whether Liger's kernels run what they can.
    """
    model = copy.deepcopy(model)
    blocks = find_blocks(model)
    kernels = _Kernels()
    if liger:
        operators.use(model, kernels)
    for weight in weights:
        if weight.plan is not None:
            layer = model.get_submodule(weight.plan.layer.name)
            layer.forward = partial(kernels.layer, weight.plan, weight.shape[-2])
    distinct: dict[object, BlockCost] = {}
    costs: list[BlockCost] = []

    def measure(index: int, x: Tensor, *inputs: Any) -> Tensor:
        block_weights = [weight for weight in weights if weight.block == index]
        kind = (type(blocks[index]), *(weight.signature for weight in block_weights))
        if kind not in distinct:
            distinct[kind] = BlockCost(blocks[index], block_weights, kernels, x, *inputs)
        costs.append(distinct[kind])
        return x

    for index, block in enumerate(blocks):
        block.forward = partial(measure, index)
    with use(Context(recipe=recipe)), torch.no_grad():
        model(tokens)
    return costs
