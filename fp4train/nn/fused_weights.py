"""Weights that are one in serving, and share a scale: queries, keys and values; gate and up."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fp4train.precision.layers import Layer


class WeightOwner(Protocol):
    """A layer with one weight or several: its name, and this rank's weights [N, K]."""

    layer: Layer

    @property
    def own_weights(self) -> Sequence[Tensor]: ...


class FusedWeights:
    """The weights of layers that are one in serving (`Layer.fused`). Layers are held weakly; copies
    find each other.
    """

    __slots__ = ("_layers",)

    def __init__(self) -> None:
        self._layers: dict[str, weakref.ref[WeightOwner]] = {}

    def __reduce__(self) -> tuple[type[FusedWeights], tuple[()]]:
        return FusedWeights, ()

    def add(self, layer: WeightOwner) -> None:
        """Let `layer` be the one of its name; nothing if there is one."""
        registered = self._layers.get(layer.layer.name)
        if registered is None or registered() is None:
            self._layers[layer.layer.name] = weakref.ref(layer)

    def layers(self, names: Sequence[str]) -> list[WeightOwner | None]:
        """The layers of these names; None for one that is not there."""
        return [self._layers.get(name, lambda: None)() for name in names]

    def of(self, names: Sequence[str], member: int = 0) -> list[Tensor]:
        """This rank's weights [N, K] of the layers of these names; of groups those at the place
        `member`.

        Raises:
            RuntimeError: a layer is not there.
        """
        layers = self.layers(names)
        if missing := [name for name, layer in zip(names, layers, strict=True) if layer is None]:
            raise RuntimeError(
                f"{', '.join(names)} share one scale (recipe.fused_scales), and "
                f"{', '.join(missing)} is not in this "
                "model: copy the module that holds all of them, or take recipe.fused_scales=false"
            )
        return [layer.own_weights[member] for layer in layers if layer is not None]
