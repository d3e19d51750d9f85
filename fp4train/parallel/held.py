"""Names of the whole model, of which a pipeline's rank holds a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp4train.precision.layers import Layer


def modules_in_order(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules of a model, each after those inside of it; in the order in which their
    forward passes end, where they run in the order of their definition.
    """

    def inside(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            yield from inside(child, f"{prefix}{name}.")
        yield prefix.removesuffix(".")

    return tuple(inside(model, ""))


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Names of the whole model's state, taken before it is cut.

    Args:
        state: keys of its state dict.
        layers: its linear layers, by name.
        modules: names of all its modules, in the order in which their forward passes end.
        tied: name of a copy on the last stage → name of the weight on the first.
        parameters: number of all elements.
    """

    state: frozenset[str]
    layers: Mapping[str, Layer]
    modules: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, layers: Mapping[str, Layer], tied: Mapping[str, str]
    ) -> Inventory:
        """The inventory of a whole model."""
        count = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            state=frozenset(model.state_dict()),
            layers=layers,
            modules=modules_in_order(model),
            tied=tied,
            parameters=count,
        )

    def weights(self, local: dict[str, Any]) -> dict[str, Any]:
        """The state dict of this rank's stages as its part of the whole: a tied weight is the first
        stage's.
        """
        untied = {name: tensor for name, tensor in local.items() if name not in self.tied}
        return untied | {copy: untied[name] for copy, name in self.tied.items() if name in untied}

    def elsewhere(self, model: nn.Module) -> set[str]:
        """Names in the whole model's state dict, and of its layers, that this rank's stages do not
        hold.
        """
        modules = {name for name, _ in model.named_modules()}
        return (set(self.state) - set(model.state_dict())) | (set(self.layers) - modules)
