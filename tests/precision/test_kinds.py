"""A value of the wrong kind is refused where it is given, by name, and not where it would fail or
pass unnoticed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp4train as f4
from fp4train.precision import BF16, NVFP4, LayerPolicy, Phase
from fp4train.precision.recipes import Custom, Mixed
from fp4train.quantize import quantize

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a word for a switch": (lambda: NVFP4(hadamard="yes"), "hadamard='yes' must be True or False"),  # type: ignore[arg-type]
    "a number for a switch": (
        lambda: NVFP4(two_d_weights=1),
        "two_d_weights=1 must be True or False",
    ),  # type: ignore[arg-type]
    "a word for a number": (lambda: NVFP4(guard="1"), "guard='1' must be a number"),  # type: ignore[arg-type]
    "a number for a word": (lambda: BF16(dtype=16), "dtype=16 must be text"),  # type: ignore[arg-type]
    "a name for a recipe": (
        lambda: LayerPolicy(recipe_for_kept="bf16"),
        "recipe_for_kept='bf16' must be a recipe",
    ),  # type: ignore[arg-type]
    "no recipe": (lambda: Phase(start=1, recipe=None), "recipe=None must be a recipe"),  # type: ignore[arg-type]
    "a recipe for operands": (
        lambda: Custom(fprop=NVFP4()),
        "must be Operands.*Mixed takes a recipe for each GEMM",
    ),  # type: ignore[arg-type]
    "no part": (lambda: Mixed(dgrad=None), "dgrad=None must be a recipe"),  # type: ignore[arg-type]
    "no model": (lambda: f4.plan(None, NVFP4()), "plan takes a model"),  # type: ignore[arg-type]
    "no spec": (lambda: quantize(torch.zeros(2, 16), None), "spec=None must be a QuantSpec"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG.keys())
def test_the_wrong_kind_is_refused(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
