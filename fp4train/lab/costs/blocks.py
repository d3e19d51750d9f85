"""Memory that a block keeps for backward and bytes that it moves between its GEMMs, measured on the meta device.

A block of the real model runs forward and backward once, on tensors without memory. Its linear layers and attention
products are replaced by stand-ins that keep what the real ones keep and compute nothing:

    linear layer     x for wgrad: q(xᵀ) as packed codes and scales, or x in high precision
    attention        q, k, v, the output and a float32 log-sum-exp per row (FlashAttention, arXiv:2205.14135)

What lies between them is what torch does with the block's own code, or one of the kernels of `elementwise.py`, so a new
model family needs no formula here. Counted are the bytes of the tensors that autograd keeps, each storage once, and
those that the operations between the products read and write, and their arithmetic. Weights are not counted:
`memory.py` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp4train.lab.costs.elementwise import BlockTraffic, KernelStandIns, ProducerStandIn
from fp4train.lab.costs.estimate import shares_x
from fp4train.models.common.operators import Fusible
from fp4train.models.common.stream import readers_between
from fp4train.nn.produced import Producer
from fp4train.precision.context import Context, use
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.recipe import Recipe
from fp4train.quantize import QuantSpec, packed_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Products q·kᵀ and p·v of one block: q is [batch, heads, time, head_dim], k and v have `kv_heads`."""

    batch: int
    heads: int
    kv_heads: int
    time: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Forward; half of the square if causal. Backward takes 2.5 times as many, one product being recomputed."""
        return (2 if self.causal else 4) * self.batch * self.heads * self.time**2 * self.head_dim


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block and one microbatch, before any splitting.

    Args:
        saved: bytes kept for backward.
        routed: the part of `saved` that every tensor-parallel rank has of all tokens: the input of a router.
        whole: the part of `saved` that tensor parallelism without sequence parallelism repeats on every rank: tensors
            of the residual stream and the inputs of column-wise split layers.
        forward, backward: bytes that the operations between the products read and write, each operation by itself.
        fused_forward, fused_backward: bytes that kernels of several operations move (norms; those of Liger).
        forward_flops, backward_flops: of products and Fourier transforms outside of linear layers and attention.
        attentions: its attention products.
        input: bytes of the residual stream: the block's input, or what a pipeline stage sends.
        operations: kernels that these are, forward and backward.
        weights: bytes of the copies in the recipe's dtype that layers without a quantised GEMM keep of their weights.
    """

    saved: float
    routed: float
    weights: float
    whole: float
    forward: float
    backward: float
    fused_forward: float
    fused_backward: float
    forward_flops: float
    backward_flops: float
    operations: int
    attentions: tuple[AttentionShape, ...]
    input: float


def measure_blocks(
    model: nn.Module,
    plans: Mapping[str, LayerPlan],
    recipe: Recipe,
    *,
    sequences: int,
    seq_len: int,
    row_wise: Collection[str] = (),
    sharing: bool = True,
    liger: bool = False,
    producers: Mapping[nn.Module, Producer] = MappingProxyType({}),
    between: Collection[nn.Module] = (),
) -> list[BlockCost]:
    """The cost of every block of `model` (on the meta device), for a microbatch of `sequences` × `seq_len` tokens.

    Blocks with equal plans and parameters are measured once.

    Args:
        plans: what each linear layer runs, by name.
        row_wise: layers whose inputs tensor parallelism splits, not their outputs.
        sharing: layers that read one input share its codes, on Transformer Engine those that the model names; not under
            train.compile.
        liger: whether Liger's kernels run what they can.
        producers: of the norms and gates that quantise their results.
        between: the norms that add up the stream at the end of the block before theirs, as if no stage ended there.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    known: dict[object, BlockCost] = {}
    found = []
    inputs = _inputs(model, blocks, recipe, sequences, seq_len)
    ends = [None, *(norm if norm in between else None for norm in readers_between(blocks)), None]
    for block, *sums in zip(blocks, ends, ends[1:], strict=False):
        mine = {names[part]: part for part in block.modules() if names[part] in plans}
        prefix = names[block]
        layers_key = tuple((n.removeprefix(prefix), plans[n].products) for n in mine)
        made = {part: producers[part] for part in block.modules() if part in producers}
        made_key = tuple((names[part].removeprefix(prefix), each.by_backend) for part, each in made.items())
        left = tuple(each is None for each in sums)
        key = (type(block), sum(p.numel() for p in block.parameters()), layers_key, made_key, left)
        if key not in known:
            layers = {part: plans[name] for name, part in mine.items()}
            made |= {norm: producers[norm] for norm in sums if norm is not None}
            known[key] = _measure(block, inputs[block], layers, row_wise, recipe, sharing, liger, made, sums)
        found.append(known[key])
    return found


def _inputs(
    model: nn.Module, blocks: list[nn.Module], recipe: Recipe, sequences: int, seq_len: int
) -> dict[nn.Module, tuple[Any, ...]]:
    """Arguments that the model calls each block with, where every block passes its input on."""
    seen: dict[nn.Module, tuple[Any, ...]] = {}

    def note(block: nn.Module, x: Tensor, *others: Any) -> Tensor:
        seen[block] = (x, *others)
        return x

    with _forwards({block: partial(note, block) for block in blocks}), use(Context(recipe=recipe)), torch.no_grad():
        model(torch.empty(sequences, seq_len, dtype=torch.int64, device="meta"))
    return seen


@contextmanager
def _forwards(replaced: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules whose forward is another function for a while."""
    with ExitStack() as stack:
        for module, forward in replaced.items():
            stack.enter_context(_set([module], "forward", forward))
        yield


@contextmanager
def _set(modules: Iterable[nn.Module], name: str, value: object) -> Iterator[None]:
    """Modules with an attribute of their own for a while."""
    held = list(modules)
    for module in held:
        module.__dict__[name] = value
    try:
        yield
    finally:
        for module in held:
            del module.__dict__[name]


@contextmanager
def _producing(producers: Mapping[nn.Module, object]) -> Iterator[None]:
    """Norms and gates with a producer each for a while."""
    with ExitStack() as stack:
        for part, each in producers.items():
            stack.enter_context(_set([part], "producer", each))
        yield


def _measure(
    block: nn.Module,
    inputs: tuple[Any, ...],
    layers: Mapping[nn.Module, LayerPlan],
    row_wise: Collection[str],
    recipe: Recipe,
    sharing: bool,
    liger: bool,
    producers: Mapping[nn.Module, Producer],
    sums: Sequence[nn.Module | None],
) -> BlockCost:
    """sums: the norms that add up what comes into the block and what it returns; None: torch does."""
    x = inputs[0].detach().clone().requires_grad_()
    given = {_storage(each) for each in inputs[1:] if isinstance(each, Tensor)}
    given |= {_storage(each) for each in block.parameters()}
    given_codes = {id(layer) for each in producers.values() for layer in each.readers}
    columnwise = {part: _is_column_wise(plan, row_wise) for part, plan in layers.items()}
    stand_ins = _StandIns(sharing, columnwise, {part for part in layers if id(part) in given_codes})
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        if _storage(t) not in given:
            kept[_storage(t)] = t
        return t

    traffic = BlockTraffic()
    forwards = {part: partial(stand_ins.linear, part, plan) for part, plan in layers.items()}
    kernels = KernelStandIns(traffic)
    made = {part: ProducerStandIn(kernels, each) for part, each in producers.items()}
    context = Context(recipe=recipe)
    context.stream["norm"] = sums[1]
    if sums[0] is not None:
        context.stream["sum"] = made[sums[0]].leave(x, x)._replace(h=x)
    fusible = [part for part in block.modules() if liger and isinstance(part, Fusible)]
    with (
        _forwards(forwards),
        _set(fusible, "operators", kernels),
        _producing(made),
        use(context),
        _FunctionStandIns(stand_ins, kernels),
    ):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), traffic:
            y = block(x, *inputs[1:])
        forward, fused, forward_flops = traffic.bytes, traffic.fused, traffic.flops
        traffic.bytes = traffic.fused = traffic.flops = 0.0
        with traffic:
            torch.autograd.backward(y, torch.empty_like(y))
    block.zero_grad(set_to_none=True)
    saved = {key: t.untyped_storage().nbytes() for key, t in kept.items()}
    *rows, width = x.shape
    residual = ((*rows, 1), (*rows, width))
    whole = {key for key, t in kept.items() if key in stand_ins.repeated or tuple(t.shape) in residual}
    matrix = (math.prod(rows), width) if any(plan.layer.experts for plan in layers.values()) else ()
    routed = {key for key, t in kept.items() if tuple(t.shape) == matrix and t.dtype == torch.float32} - whole
    return BlockCost(
        saved=sum(saved.values()),
        routed=sum(saved[key] for key in routed),
        weights=sum(
            plan.layer.weights * plan.table.torch_dtype.itemsize
            for plan in layers.values()
            if not plan.quantised and plan.table.torch_dtype != torch.float32
        ),
        whole=sum(saved[key] for key in whole),
        forward=forward,
        backward=traffic.bytes,
        fused_forward=fused,
        fused_backward=traffic.fused,
        forward_flops=forward_flops,
        backward_flops=traffic.flops,
        operations=traffic.operations,
        attentions=tuple(stand_ins.attentions),
        input=x.untyped_storage().nbytes(),
    )


def _is_column_wise(plan: LayerPlan, row_wise: Collection[str]) -> bool:
    """Whether tensor-parallel ranks all read the layer's input; of experts each reads the rows of its own."""
    return not plan.layer.experts and plan.layer.name not in row_wise


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


class _StandIns:
    """The stand-ins of one block, and what they saw."""

    def __init__(self, sharing: bool, columnwise: Mapping[nn.Module, bool], given: Collection[nn.Module]) -> None:
        """given: layers that are given the codes of x, as others that read it are."""
        self.sharing, self.columnwise, self.given = sharing, columnwise, given
        self.attentions: list[AttentionShape] = []
        self.repeated: set[int] = set()
        self._last: tuple[int, QuantSpec | None, Tensor] | None = None

    def linear(self, module: nn.Module, plan: LayerPlan, x: Tensor, *counts: object) -> Tensor:
        """A linear layer, or experts with the `counts` of their rows, which x has in any case."""
        specs = [(gemm.operands.second, features) for gemm, features in plan.products if gemm.name == "wgrad"]
        high = specs == [(None, plan.layer.in_features)]
        kept = x.to(plan.table.torch_dtype) if high else self._codes(x, specs, plan, module in self.given)
        if self.columnwise[module]:
            self.repeated.add(_storage(kept))
        out: Tensor = _Linear.apply(x, kept, plan.layer.out_features)  # type: ignore[no-untyped-call]
        return out

    def _codes(self, x: Tensor, specs: list[tuple[QuantSpec | None, int]], plan: LayerPlan, given: bool) -> Tensor:
        """Codes or values of so many channels of x each, as bytes; layers with one spec for all share them."""
        shares = given or plan.layer_backend is None or (len(plan.readers) > 1 and shares_x(plan))
        shares = shares and self.sharing and len(specs) == 1
        if shares and self._last is not None and self._last[:2] == (_storage(x), specs[0][0]):
            return self._last[2]
        tokens, wide = x.shape[:-1].numel(), plan.table.torch_dtype.itemsize
        size = sum(tokens * k * wide if spec is None else packed_bytes(spec, k, tokens) for spec, k in specs)
        codes = torch.empty(math.ceil(size), dtype=torch.uint8, device="meta")
        if len(specs) == 1:
            self._last = (_storage(x), specs[0][0], codes)
        return codes


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, out_features: int) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.like = x.new_empty(x.shape)
        return x.new_empty((*x.shape[:-1], out_features))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return torch.empty_like(ctx.like), None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, time, _ = q.shape
        out = q.new_empty((batch, time, heads, v.shape[-1])).transpose(1, 2)  # the layout of the kernels
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


class _FunctionStandIns(TorchFunctionMode):
    def __init__(self, stand_ins: _StandIns, kernels: KernelStandIns) -> None:
        super().__init__()
        self._found, self._kernels = stand_ins.attentions, kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            weight = args[2] if len(args) > 2 else (kwargs or {}).get("weight")
            return self._kernels.rms_norm(args[0], weight)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        batch, heads, time, dim = q.shape
        causal = bool((kwargs or {}).get("is_causal"))
        self._found.append(
            AttentionShape(batch=batch, heads=heads, kv_heads=k.shape[1], time=time, head_dim=dim, causal=causal)
        )
        return _Attend.apply(q, k, v)  # type: ignore[no-untyped-call]
