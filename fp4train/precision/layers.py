"""The linear layers of a model and where they stand in it.

A policy speaks of "the last 15 % of the blocks", so a model must say what its blocks are: the entries of its outermost
`nn.ModuleList`s, in order. Linear layers outside of them (the head, input projections) always stay in high precision.
In a model without a ModuleList each linear layer is a block of its own and none lies outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer y [*, out_features] = x [*, in_features]·wᵀ.

    Args:
        name: its module path in the model.
        block: index of the block it belongs to, or None outside of the blocks.
        blocks: how many blocks the model has.
        names: of all linear layers of the model, by which a policy checks its patterns.
    """

    name: str
    in_features: int
    out_features: int
    block: int | None
    blocks: int
    unconverted: str | None = None
    names: tuple[str, ...] = field(default=(), repr=False, compare=False)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and its subclasses, or a module that says it computes a linear layer (`is_fp4train_linear`)."""
    return isinstance(module, nn.Linear) or getattr(module, "is_fp4train_linear", False)


def _linears(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules(prefix=prefix):
        if is_linear(child):
            yield name, child


def _block_prefixes(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Paths of the entries of the outermost ModuleLists that hold a linear layer, in order of definition."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            yield from (f"{path}.{i}" for i, entry in enumerate(child) if any(map(is_linear, entry.modules())))
        else:
            yield from _block_prefixes(child, path)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model` that hold linear layers, in order; the model itself where it has none."""
    return [model.get_submodule(path) for path in _block_prefixes(model)] or [model]


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every linear layer of `model` by name, in the order of definition; a shared one stands under its first name."""
    prefixes = list(_block_prefixes(model))
    found = list(_linears(model, ""))
    names = tuple(name for name, _ in found)
    layers = {}
    for index, (name, module) in enumerate(found):
        if prefixes:
            block = next((i for i, p in enumerate(prefixes) if name == p or name.startswith(p + ".")), None)
        else:
            block = index
        layers[name] = Layer(
            name=name,
            in_features=int(module.in_features),  # type: ignore[arg-type]
            out_features=int(module.out_features),  # type: ignore[arg-type]
            block=block,
            blocks=len(prefixes) or len(found),
            names=names,
        )
    return layers
