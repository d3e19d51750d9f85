"""The part of the whole model's state that a pipeline's rank holds, in its own numbering and in
that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
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
    """Names and numbers of the whole model's state, taken before it is cut.

    Args:
        state: keys of its state dict.
        groups: parameter names of every group of the optimizer; their place in all of them is
            their number.
        layers: its linear layers, by name.
        modules: names of all its modules, in the order in which their forward passes end.
        tied: name of a copy on the last stage → name of the weight on the first.
        parameters: number of all elements.
    """

    state: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    layers: Mapping[str, Layer]
    modules: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Mapping[str, Layer],
        tied: Mapping[str, str],
    ) -> Inventory:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = tuple(
            tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups
        )
        count = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            state=frozenset(model.state_dict()),
            groups=groups,
            layers=layers,
            modules=modules_in_order(model),
            tied=tied,
            parameters=count,
        )

    @property
    def numbers(self) -> dict[str, int]:
        """Name → parameter index of the whole optimizer."""
        return {
            name: number
            for number, name in enumerate(name for group in self.groups for name in group)
        }

    # -- this rank's state as part of the whole one ------------------------------------------------

    def weights(self, own: dict[str, Any]) -> dict[str, Any]:
        """The state dict of this rank's stages as its part of the whole: a tied weight is the first
        stage's.
        """
        given = {name: tensor for name, tensor in own.items() if name not in self.tied}
        return given | {copy: given[name] for copy, name in self.tied.items() if name in given}

    def moments(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of this rank's optimizer with the whole one's numbers."""
        own = optimizer.state_dict()
        numbers = self.numbers_of(model, optimizer)
        groups = self._groups()
        return {
            "state": {numbers[number]: moments for number, moments in own["state"].items()},
            "param_groups": [
                {**g, "params": groups[numbers[g["params"][0]]]} for g in own["param_groups"]
            ],
        }

    # -- this rank's part of the whole state -------------------------------------------------------

    def own(
        self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """This rank's part of a checkpoint's state; entries that no stage should have stay, to be
        refused.
        """
        found = {**state, "model": self.own_weights(state["model"], model)}
        mine = {name for name, module in model.named_modules() if name in self.layers}
        found["scaling"] = {
            k: v for k, v in state["scaling"].items() if k in mine or k not in self.layers
        }
        saved = state["optimizer"]
        numbers = self.numbers_of(model, optimizer)
        groups = self._groups()
        mine_of = {number: own for own, number in numbers.items()}
        elsewhere = set(self.numbers.values()) - set(mine_of)
        own_groups = optimizer.state_dict()["param_groups"]
        held = {tuple(groups[numbers[group["params"][0]]]): group["params"] for group in own_groups}
        found["optimizer"] = {
            **saved,
            "state": {
                mine_of.get(n, n): moments
                for n, moments in saved["state"].items()
                if n not in elsewhere
            },
            "param_groups": [
                {**g, "params": held.get(tuple(g["params"]), g["params"])}
                for g in saved["param_groups"]
            ],
        }
        return found

    def away(self, model: nn.Module) -> set[str]:
        """Keys of the whole state dict that this rank's stages do not hold."""
        return set(self.state) - set(model.state_dict())

    def numbers_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Local → global optimizer parameter index."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = [n for group in optimizer.state_dict()["param_groups"] for n in group["params"]]
        whole = self.numbers
        return {
            number: whole[names[id(parameter)]]
            for number, parameter in zip(own, parameters, strict=True)
        }

    def own_weights(self, saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """The weights of a checkpoint that this rank's stages hold."""
        mine = set(model.state_dict())
        return {
            name: value for name, value in saved.items() if name in mine or name not in self.state
        }

    def _groups(self) -> dict[int, list[int]]:
        """The numbers of a parameter's group, by the parameter's own number, in the whole
        optimizer.
        """
        numbers = self.numbers
        groups = [[numbers[name] for name in group] for group in self.groups]
        return {number: group for group in groups for number in group}
