"""Three layers that read one x, which run an applied plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.hardware import Device
from fp4train.nn import PlannedLayer
from fp4train.parameters import ParameterSpec
from fp4train.precision import Context, Recipe, Timeline, find_layers, make_plan
from fp4train.quantize import Position, RunStep

CPU = torch.device("cpu")
K = 256
SIZES = (256, 128, 128)
TOKENS = 128


class Readers(nn.Module):
    """Three layers of one x."""

    def fp4train_parameters(self) -> list[ParameterSpec]:
        """The three layers are one group."""
        return [ParameterSpec(name=f"w{letter}.weight", fused="qkv") for letter in "qkv"]

    def __init__(self, biases: tuple[str, ...] = ("wq", "wv")) -> None:
        super().__init__()
        for name, size in zip(("wq", "wk", "wv"), SIZES, strict=True):
            setattr(self, name, nn.Linear(K, size, bias=name in biases))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wq(x), self.wk(x), self.wv(x)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(
    recipe: Recipe,
    *,
    values: Callable[..., Tensor] = normal,
    sums: bool = False,
    in_product: bool = True,
    backend: str = "auto",
    biases: tuple[str, ...] = ("wq", "wv"),
) -> Any:
    """The layers, which run an applied plan."""
    model: Any = f4.convert(Readers(biases), backend=backend)
    with torch.no_grad():
        for seed, each in enumerate(model.parameters()):
            each.copy_(values(*each.shape, seed=seed))
    layers = find_layers(model)
    options: dict[str, Any] = {"tokens": TOKENS, "device": Device(type="cpu"), "backend": backend}
    stretch = make_plan(
        layers.values(), Timeline(recipe=recipe, steps=9), None, **options
    ).stretches[0]
    for module in model.modules():
        if isinstance(module, PlannedLayer):
            module.sum_gradients(sums, in_product=in_product)
            module.apply_plan(stretch.layers[module.layer.name], recipe, None, CPU)
    return model


def within(recipe: Recipe, step: int | None = 0, **options: Any) -> Context:
    return Context(
        recipe=recipe,
        position=Position(RunStep(1, step or 0)),
        counts="calls" if step is None else "nothing",
        applied=True,
        **options,
    )
