"""What a model says of its parameters: one table from which follow the cut over tensor-parallel
ranks, the stages of a pipeline, initial weights, weight decay, groups of layers, and the names in
the folders of other software.

A module that knows its parameters has a method `fp4train_parameters()`, which returns a
`ParameterSpec` for each of them, named as inside the module. The outermost module that speaks of a
parameter counts. What no module speaks of is trained on one rank or on data ranks, and has the
defaults of a `ParameterSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

DECLARED_BY = "fp4train_parameters"

Stored: TypeAlias = str | tuple[tuple[str, ...], ...]
"""The place of a tensor of the state dict in a folder: one name, or of a weight [E, N, K] of
experts its matrices: for each expert the names of those whose rows follow one another, as many of
each.
"""


class Split(StrEnum):
    """How p tensor-parallel ranks share a parameter."""

    OUT = "out"
    """Linear layer [N, K] → [N/p, K], with its bias; it reads activations that every rank has
    whole.
    """
    IN = "in"
    """Linear layer → [N, K/p]; it reads what layers of `OUT` made. Its bias is whole."""
    EXPERTS = "experts"
    """Group of weights, of which each rank has E/p whole ones, for all tokens."""
    VOCABULARY = "vocabulary"
    """Weight [vocabulary, width], cut along the vocabulary."""
    ROWS = "rows"
    """Cut along the first dimension, that of heads, groups or channels: each rank computes with its
    own.
    """
    TOKENS = "tokens"
    """Whole, in a module that acts on each token alone (a norm of the stream) and whose attribute
    `tensor` is set: if tokens are cut, gradients are sums over the ranks.
    """
    HEADS = "heads"
    """Whole, in a module that acts on each head alone (a norm of queries or keys), like `TOKENS`:
    gradients are sums over the ranks, whether tokens are cut or not.
    """
    FEATURES = "features"
    """Cut like `ROWS`, in a norm over the features of all ranks (of all heads of queries or keys),
    whose attribute `tensor` is set: each rank normalises its own by the mean square of all.
    """
    WHOLE = "whole"
    """Whole, and computed alike on every rank."""

    @property
    def divides(self) -> bool:
        """Whether each rank has its part of the parameter alone."""
        return self not in (Split.TOKENS, Split.HEADS, Split.WHOLE)


@dataclass(frozen=True)
class Normal:
    """Independent values with mean 0 and standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Filled:
    """One value everywhere."""

    value: float


@dataclass(frozen=True)
class Uniform:
    """Independent values, evenly distributed between `low` and `high`; `through` maps each in
    float64.
    """

    low: float
    high: float
    through: Callable[[Tensor], Tensor] = torch.clone


@dataclass(frozen=True)
class Numbered:
    """`of` the numbers 0, 1, … along the first dimension, in float64; the same in all others."""

    of: Callable[[Tensor], Tensor]


class Spread(Enum):
    """A normal distribution whose standard deviation the model's shape gives (`DecoderShape`)."""

    MATRIX = "matrix"
    RESIDUAL = "residual"
    """Of a layer that writes to the residual stream: smaller."""


@dataclass(frozen=True)
class Computed:
    """What `values` returns, on the CPU: of a buffer that follows from the model's shape."""

    values: Callable[[], Tensor]


Initial: TypeAlias = Normal | Uniform | Numbered | Filled | Computed
"""Only `Normal` values come from torch's generator with the draw `torch`; `Uniform` ones are drawn
by counter.
"""

ZEROS = Filled(0.0)
ONES = Filled(1.0)


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter or buffer.

    Args:
        name: name in the state dict of the module that declares it.
        stored: name in the folder of other software; "": it has none.
        cut: cut by which tensor-parallel ranks share it.
        segments: rows that belong together, from the first on: each rank has its part of each
            segment. Without an entry all are one.
        counts: (attribute, key of the configuration) of numbers that are divided with it,
            attributes of the module that holds its layer, such as ("heads", "model.heads").
        initial: initial values; None: the module's constructor alone draws them.
        stage: the stage of a pipeline that has it: the first, the last, or that of its block.
        tied: name of the parameter whose tensor it is, too; "": it is a tensor of its own.
        copied: whether a folder has a tied weight under both names.
        fused: a label that the layers of one input share which serving software multiplies as one
            (queries, keys and values); they quantise one x, and under `recipe.fused_scales` their
            weights share one global scale.
        elementwise: whether it is no factor of a matrix product whatever its shape, such as filters
            of channels: it is not converted, and weight decay spares it.
        high_precision: reason why a matrix stays in high precision on purpose; "": it does not.
        largest: the largest value that it may have after a step; None: any.
    """

    name: str
    stored: Stored = ""
    cut: Split = Split.WHOLE
    segments: tuple[int, ...] = ()
    counts: tuple[tuple[str, str], ...] = ()
    initial: Initial | Spread | None = None
    stage: Literal["first", "last", "block"] = "block"
    tied: str = ""
    copied: bool = False
    fused: str = ""
    elementwise: bool = False
    high_precision: str = ""
    largest: float | None = None

    @property
    def layer(self) -> str:
        """Name of the module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def holder(self) -> str:
        """Name of the module that holds that module."""
        return self.layer.rpartition(".")[0]

    def inside(self, path: str, stored: str) -> ParameterSpec:
        """The same parameter of a module at `path`, whose tensors lie under `stored` in a
        folder.
        """
        tied = joined(path, self.tied) if self.tied else ""
        if isinstance(self.stored, str):
            place: Stored = joined(stored, self.stored) if self.stored else ""
        else:
            place = tuple(tuple(joined(stored, name) for name in names) for names in self.stored)
        return replace(
            self,
            name=joined(path, self.name),
            stored=place,
            tied=tied,
        )


def joined(path: str, name: str) -> str:
    """The name of what has `name` inside the module at `path`, which is "" for the model itself."""
    return f"{path}.{name}" if path else name


def inside(path: str, stored: str, specs: Iterable[ParameterSpec]) -> Iterator[ParameterSpec]:
    """The parameters of a module at `path`, whose tensors lie under `stored` in a folder."""
    return (spec.inside(path, stored) for spec in specs)


def linear(
    name: str,
    stored: str,
    *,
    cut: Split,
    bias: bool = False,
    initial: Initial | Spread | None = None,
    fused: str = "",
    segments: tuple[int, ...] = (),
    counts: tuple[tuple[str, str], ...] = (),
) -> list[ParameterSpec]:
    """Weight and bias of a linear layer; None: a layer cut along `IN` writes to the residual
    stream.
    """
    if initial is None:
        if cut is Split.IN:
            initial = Spread.RESIDUAL
        else:
            initial = Spread.MATRIX
    weight = ParameterSpec(
        name=f"{name}.weight",
        stored=f"{stored}.weight",
        cut=cut,
        segments=segments,
        counts=counts,
        initial=initial,
        fused=fused,
    )
    if not bias:
        return [weight]
    with_rows = cut if cut is Split.OUT else Split.WHOLE
    name_of_bias = f"{name}.bias"
    return [
        weight,
        ParameterSpec(name=name_of_bias, stored=f"{stored}.bias", cut=with_rows, initial=ZEROS),
    ]


def norm(name: str, stored: str, *, cut: Split = Split.TOKENS) -> ParameterSpec:
    """The weight of a norm; `stored` is its own name in a folder."""
    return ParameterSpec(name=f"{name}.weight", stored=stored, cut=cut, initial=ONES)


def declared(model: nn.Module) -> dict[str, ParameterSpec]:
    """Name → what the model or a part of it says of a parameter or buffer, in the order of the
    tables.

    Raises:
        TypeError: an answer is no sequence of `ParameterSpec`.
        ValueError: an answer names a parameter that its module does not have.
    """
    specs: dict[str, ParameterSpec] = {}
    for path, module in model.named_modules():
        # Not asked by `getattr`: a wrapper such as torch.compile's forwards attribute access, but has
        # other paths.
        if DECLARED_BY not in vars(module) and not hasattr(type(module), DECLARED_BY):
            continue
        where = f"{DECLARED_BY} of {path or type(module).__name__}"
        names = {
            *dict(module.named_parameters(remove_duplicate=False)),
            *dict(module.named_buffers()),
        }
        for spec in getattr(module, DECLARED_BY)():
            if not isinstance(spec, ParameterSpec):
                raise TypeError(
                    f"{where} gives a {type(spec).__name__}; it must give ParameterSpec"
                )
            if spec.name not in names:
                raise ValueError(
                    f"{where} names {spec.name!r}, which is no parameter of {type(module).__name__}"
                )
            in_model = spec.inside(path, "") if path else spec
            specs.setdefault(in_model.name, in_model)
    return specs


def largest_values(model: nn.Module) -> dict[str, float]:
    """Name → the largest value that a parameter may have after a step, of those that have one."""
    return {
        name: spec.largest for name, spec in declared(model).items() if spec.largest is not None
    }
