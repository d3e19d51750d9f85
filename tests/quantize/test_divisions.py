"""The reference has one result on all devices: CUDA divides by a number by multiplying with its
reciprocal, which rounds otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp4train.config import RECIPES
from fp4train.precision import Recipe
from fp4train.quantize import QuantSpec, RandomKey, quantizer

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
KEY = RandomKey(seed=1, step=2, layer=3, operand=0)


class Divisors(TorchDispatchMode):
    """The numbers that tensors of floating-point numbers are divided by, but for powers of two."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            divisor = args[1]
            if not isinstance(divisor, Tensor) and math.frexp(abs(divisor))[0] != 0.5:
                self.seen.append(divisor)
        return func(*args, **(kwargs or {}))


def specs_of(recipe: Recipe) -> set[QuantSpec]:
    table = recipe.table()
    specs = {spec for gemm in ("fprop", "dgrad", "wgrad") for spec in table[gemm].both}
    return {spec for spec in specs if spec is not None}


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_divides_by_tensors_alone(name: str, recipes: dict[str, Recipe]) -> None:
    x = torch.randn(64, 256).bfloat16()
    with Divisors() as divisors:
        for spec in specs_of(recipes[name]):
            reference = quantizer(spec, "cpu", "reference")
            key = KEY if spec.random or spec.hadamard else None
            amax = torch.tensor(3.0) if spec.delayed or spec.held else None
            reference.decode(reference.codes(x, key, amax))
    assert divisors.seen == []
