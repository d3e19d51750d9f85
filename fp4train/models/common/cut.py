"""How a model is cut over ranks, as its parameters say: by tensor parallelism, and into a
pipeline's stages.

A stage is the model itself with some of its modules: names of parameters and layers are those of
the whole model. The first stage turns tokens into the residual stream, each one runs its blocks,
the last turns the stream into the loss.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks, local, summed_over, with_summed_gradient
from fp4train.parameters import ParameterSpec, Split, declared
from fp4train.precision.layers import Layer, find_layers
from fp4train.shards import RowOrder


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """Names of modules by how they are cut over p ranks.

    Args:
        out: linear layers [N, K] cut into [N/p, K]; they read activations that every rank has
            whole.
        in_: linear layers cut into [N, K/p]; they read what the layers of `out` made.
        experts: groups of weights, of which each rank has E/p whole ones, for all tokens.
        vocabulary: modules with a weight [vocabulary, width], cut along the vocabulary.
        tokens: modules that act on each token alone (norms). Their parameters stay whole, and their
            attribute `tensor` is set: if tokens are cut, their gradients are sums over the ranks.
        heads: modules that act on each head alone (norms of queries and keys), like `tokens`: their
            parameters stay whole, and their gradients are sums over the ranks, whether tokens are
            cut or not.
        rows: parameters, by name, cut along their first dimension, which is that of heads, groups
            or channels: each rank computes with its own.
        features: norms over the features of all ranks, whose weights are among `rows`. Their
            attribute `tensor` is set: the mean square is that of all ranks.
        segments: for a layer of `out` or a parameter of `rows`, by name, the number of its rows
            belong together, from the first on: each rank has its part of each segment. Without an
            entry all are one.
        counts: (module, attribute, key of the configuration) of numbers that are divided by p.
    """

    out: tuple[str, ...]
    in_: tuple[str, ...]
    experts: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    segments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    counts: tuple[tuple[str, str, str], ...] = ()

    @staticmethod
    def of(specs: Iterable[ParameterSpec]) -> TensorCut:
        """The cut of a model with these parameters."""
        names: dict[Split, dict[str, None]] = {cut: {} for cut in Split}
        segments: dict[str, tuple[int, ...]] = {}
        counts: dict[tuple[str, str, str], None] = {}
        for spec in specs:
            name = spec.name if spec.cut is Split.ROWS else spec.layer
            names[spec.cut][name] = None
            if spec.cut is Split.FEATURES:
                names[Split.ROWS][spec.name] = None
            if spec.segments:
                segments[name] = spec.segments
            counts |= {(spec.holder, *count): None for count in spec.counts}
        return TensorCut(
            out=tuple(names[Split.OUT]),
            in_=tuple(names[Split.IN]),
            experts=tuple(names[Split.EXPERTS]),
            vocabulary=tuple(names[Split.VOCABULARY]),
            tokens=tuple(names[Split.TOKENS]),
            heads=tuple(names[Split.HEADS]),
            rows=tuple(names[Split.ROWS]),
            features=tuple(names[Split.FEATURES]),
            segments=segments,
            counts=tuple(counts),
        )

    def part(self, layer: Layer, ranks: int) -> Layer:
        """What one of so many ranks has of a layer."""
        features = "in" if layer.name in self.in_ else "out"
        return layer.part(features, ranks, self.segments.get(layer.name, ()))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRanks:
    """The ranks that share a model's vocabulary and, with `sequence`, the tokens of its residual
    stream.
    """

    ranks: Ranks
    sequence: bool

    def stream(self, batch: int, time: int, width: int) -> tuple[int, ...]:
        """The shape of the residual stream on a rank: its share of the tokens, or all of them."""
        if self.sequence:
            return (batch * time // self.ranks.size, width)
        return (batch, time, width)


class TensorParallel(Protocol):
    """A model whose parameters say how they are cut. Its `tensor` and `row_orders` are set when it
    is cut.
    """

    tensor: TokenRanks | None
    row_orders: Mapping[str, RowOrder]
    """The parameters that are cut in segments, by name."""


def tensor_cut(model: nn.Module) -> TensorCut:
    """How tensor parallelism cuts a model, as its parameters say; nothing, where none is cut."""
    return TensorCut.of(declared(model).values())


def _whole(parameter: Tensor) -> Tensor:
    return parameter


class HoldsParts:
    """A module that computes with parameters of its own, as `held` gives them: whole, or this
    rank's parts.
    """

    held: Callable[[Tensor], Tensor] = staticmethod(_whole)
    """The values of a parameter that this rank has; set when the model is cut."""


def shared_by(tensor: TokenRanks, parameter: Tensor) -> Tensor:
    """A parameter that every rank has whole, for use on this rank's tokens; differentiable.

    torch.compile breaks the graph here: the backward pass adds the gradients of the ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        from fp4train.precision import compile_context

        result: Tensor = compile_context.call(shared_eagerly, tensor, parameter)
        return result
    return shared_eagerly(tensor, parameter)


def shared_eagerly(tensor: TokenRanks, parameter: Tensor) -> Tensor:
    """`shared_by` outside torch.compile."""
    shared = local(parameter)
    if tensor.sequence:
        return with_summed_gradient(shared, tensor.ranks)
    return shared


def summed_statistic(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of x over ranks, each of which has other uses for it; differentiable.

    torch.compile breaks the graph here, as in `shared_by`.
    """
    if torch.compiler.is_dynamo_compiling():
        from fp4train.precision import compile_context

        result: Tensor = compile_context.call(summed_eagerly, x, ranks)
        return result
    return summed_eagerly(x, ranks)


def summed_eagerly(x: Tensor, ranks: Ranks) -> Tensor:
    """`summed_statistic` outside torch.compile."""
    return with_summed_gradient(summed_over(x, ranks, rows=False, dtype=x.dtype), ranks)


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """How a model is cut into stages.

    Args:
        blocks: attribute of the model with the `nn.ModuleList` of blocks, which are shared out in
            order; the forward pass iterates over it (a stage's list has the keys of the whole one,
            so that names stay).
        first: attributes with the modules that the first stage alone has.
        last: attributes with those that the last stage alone has.
        width: width of the residual stream, which stages send each other: [B, T, width], or the
            share of a tensor-parallel rank [B·T / p, width] (`TokenRanks.stream`).
    """

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    width: int


def stage_cut(model: nn.Module) -> StageCut | None:
    """How a pipeline cuts a model, as its parameters say; None: they do not.

    The residual stream has the width of the first stage's embedding.

    Raises:
        ValueError: its blocks are not in one list.
    """
    tops: dict[str, dict[str, ParameterSpec]] = {"first": {}, "last": {}, "block": {}}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for spec in declared(model).values():
        if spec.name not in parameters:
            continue
        tops[spec.stage].setdefault(spec.name.partition(".")[0], spec)
    if not tops["first"] or not tops["last"]:
        return None
    if len(tops["block"]) != 1:
        places = ", ".join(tops["block"]) or "nothing"
        raise ValueError(
            f"the blocks of {type(model).__name__} must be in one nn.ModuleList, not in {places}"
        )
    embedding = next(iter(tops["first"].values()))
    return StageCut(
        blocks=next(iter(tops["block"])),
        first=tuple(tops["first"]),
        last=tuple(tops["last"]),
        width=parameters[embedding.name].shape[-1],
    )


def multiplications(module: nn.Module, time: int) -> int:
    """Forward multiplications per token in sequences of `time` tokens: one for each weight of a
    matrix, of experts for those to which the token is routed, and what parts of the module say that
    they multiply besides.

    A part that does has a method `fp4train_mixing(time)`: attention its products of queries, keys
    and values, a scan its products, a long convolution its Fourier transforms. Numbers are those of
    the whole model, also where tensor-parallel ranks share it, and do not depend on the recipe.
    """
    count = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)
    for part in module.modules():
        if isinstance(part, PlannedLayer) and part.layer.experts:
            idle = part.layer.group - part.layer.per_token
            count -= (
                sum(p.numel() for p in part.parameters() if p.dim() > 1) * idle // part.layer.group
            )
        count += int(getattr(part, "fp4train_mixing", lambda _: 0)(time))
    return count


def multiplied(
    model: nn.Module, blocks: Sequence[nn.Module], time: int
) -> tuple[tuple[int, ...], int]:
    """(`multiplications` of each of a model's blocks, those besides).

    Besides the blocks multiplies what the last stage of a pipeline has, such as the head; where a
    model does not say how it is cut into stages, its linear layers outside of blocks.
    """
    outside = [name for name, layer in find_layers(model).items() if layer.block is None]
    cut = stage_cut(model)
    last = outside if cut is None else cut.last
    besides = sum(multiplications(model.get_submodule(name), time) for name in last)
    return tuple(multiplications(block, time) for block in blocks), besides


def share_blocks(costs: Sequence[int], last: int, parts: int) -> list[range]:
    """Shares blocks out in order, so that the most expensive of `parts` parts costs least.

    Of such shares the most even one is taken, by the sum of squares, and of those the one whose
    first parts are the shortest: early stages keep the activations of the most microbatches.

    Args:
        costs: costs of the blocks, at least as many as `parts`; such as `multiplications`.
        last: cost of what the last part does besides, such as the head.

    Returns:
        The indices of each part's blocks, at least one.
    """
    count = len(costs)
    sums = [0, *accumulate(costs)]

    def needed(most: int) -> int:
        """The parts that blocks fill, from the last one on, if none costs more than `most`."""
        stages = 1
        spent = last
        for cost in reversed(costs):
            if spent + cost > most:
                stages = stages + 1
                spent = 0
            spent += cost
        return stages

    bounds = range(max(*costs, costs[-1] + last), sums[count] + last + 1)
    most = bounds[bisect_left(bounds, True, key=lambda bound: needed(bound) <= parts)]

    # By the first block of the rest: the least sum of squares where no part costs more, and where
    # the first part ends.
    left = [sums[count] - sums[start] + last for start in range(count)]
    tables: list[list[tuple[float, int]]] = [
        [(cost * cost if cost <= most else math.inf, count) for cost in left]
    ]
    for part in range(1, parts):
        after = tables[-1]
        table = []
        for start in range(count - part):
            best: tuple[float, int] = math.inf, count
            for end in range(start + 1, count - part + 1):
                cost = sums[end] - sums[start]
                if cost > most:
                    break
                best = min(best, (cost * cost + after[end][0], end))
            table.append(best)
        tables.append(table)
    ends = [0]
    for table in reversed(tables):
        ends.append(table[ends[-1]][1])
    return [range(start, end) for start, end in pairwise(ends)]


class Tie(Protocol):
    """A weight that the first stage owns and the last one has a copy of (tied embedding and
    head).
    """

    def send(self, gradient: Tensor) -> None:
        """Give the gradient of the copy in one microbatch to the first stage."""

    def receive(self, weight: Tensor) -> Tensor:
        """The gradient of the copy in the microbatch whose backward pass runs; it lies as `weight`
        does.
        """


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of a model that a module is.

    Args:
        first, last: whether it begins with tokens, and whether it ends with the loss.
        tie: the tie of embedding and head where they are one weight on two stages.
    """

    first: bool = True
    last: bool = True
    tie: Tie | None = None

    def embedding(self, w_VD: Tensor) -> Tensor:
        """The embedding's weight for use on the first stage: its gradient includes that of the
        head.
        """
        if self.tie is None:
            return w_VD
        result: Tensor = _WithGradientOfCopy.apply(w_VD, self.tie)  # type: ignore[no-untyped-call]
        return result

    def head(self, x: Tensor, w_VD: Tensor) -> tuple[Tensor, Tensor]:
        """(x, the head's weight) for use on the last stage: the weight's gradient goes to the first
        stage.
        """
        if self.tie is None or not torch.is_grad_enabled():
            return x, w_VD
        result: tuple[Tensor, Tensor] = _Copy.apply(x, w_VD, self.tie)  # type: ignore[no-untyped-call]
        return result


WHOLE = Stage()
"""A model that is not cut."""


class _WithGradientOfCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, tie: Tie) -> Tensor:
        ctx.tie = tie
        return w.view_as(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        # Microbatch by microbatch, as on one stage: float32 sums depend on their order.
        return ctx.tie.receive(dw) + dw, None


class _Copy(torch.autograd.Function):
    """The copy is not trained: it gets the weight of the first stage after each step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tie: Tie) -> tuple[Tensor, Tensor]:
        ctx.tie = tie
        return x.view_as(x), w.view_as(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dw: Tensor) -> tuple[Tensor, None, None]:
        ctx.tie.send(dw)
        return dx, None, None


class Pipelined(Protocol):
    """A model whose parameters say which stage of a pipeline has them. Its forward pass reads
    `stage`.

    The first stage is called with tokens. A later one is called with the residual stream and with
    `time`, the number of tokens of a sequence, which the share of a tensor-parallel rank does not
    tell; the last one with `targets_BT` too.
    """

    stage: Stage
