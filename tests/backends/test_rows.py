"""The bits of a product's rows do not depend on which other rows are multiplied with them, nor on
their scales.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fp4train.backends import matmul
from fp4train.precision import Recipe
from fp4train.quantize import Decoded, QuantSpec, RandomKey, quantizer

ROWS, COLUMNS, CONTRACTED = 640, 320, 64


def generated(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operand(spec: QuantSpec | None, rows: int, seed: int) -> Decoded:
    """An operand with the scales of a spec and integers for values: sums of products are exact, in
    any order. Neighbouring rows have one amax: 1 to 200 of them.
    """
    integers = torch.randint(-6, 7, (rows, CONTRACTED), generator=generated(seed)).bfloat16()
    if spec is None:
        return Decoded(integers, None)
    runs = torch.randint(1, 200, (rows,), generator=generated(seed + 1))
    sizes = torch.rand(rows, 1, generator=generated(seed + 2)).repeat_interleave(runs, 0)[:rows]
    tensor = (torch.full((rows, CONTRACTED), 3.0) * sizes).bfloat16()
    key = RandomKey(seed=1, step=1, layer=1, operand=1) if spec.random else None
    amax = torch.tensor(3.0) if spec.earlier_amax else None
    prepared = quantizer(spec, "cpu").values(tensor, key, amax)
    return Decoded(integers.to(prepared.values.dtype), prepared.scale)


Specs = tuple[QuantSpec | None, QuantSpec | None]
TENSOR = "bfloat16 with a tensor's scale"
ROW = "bfloat16 with scales of 1 rows"
SEVERAL = "bfloat16 with scales of 256 rows"
PLAIN = "bfloat16 without a scale"
WIDE = "float32 without a scale"
PATHS = (
    (PLAIN, PLAIN),
    (WIDE, WIDE),
    (PLAIN, WIDE),
    (TENSOR, TENSOR),
    (ROW, ROW),
    (ROW, TENSOR),
    (TENSOR, ROW),
    (SEVERAL, TENSOR),
    (SEVERAL, SEVERAL),
    ("float32 with a tensor's scale", "float32 with a tensor's scale"),
)
"""The combinations of dtypes and scales that products of recipes have."""


@pytest.fixture(scope="module")
def products(recipes: dict[str, Recipe]) -> dict[tuple[str, str], Specs]:
    """The specs of a product of a recipe for each combination."""

    def kind(spec: QuantSpec | None) -> str:
        values, scale, _ = operand(spec, 4, 0)
        dtype = str(values.dtype).removeprefix("torch.")
        if scale is None or spec is None:
            return f"{dtype} without a scale"
        if not scale.dim():
            return f"{dtype} with a tensor's scale"
        return f"{dtype} with scales of {spec.scaled_rows or 1} rows"

    specs = [gemm.both for recipe in recipes.values() for gemm in recipe.table().values()]
    return {(kind(first), kind(second)): (first, second) for first, second in specs}


def test_the_products_of_recipes_are_these(products: dict[tuple[str, str], Specs]) -> None:
    assert set(products) == set(PATHS)


def cut(whole: Decoded, start: int, stop: int) -> Decoded:
    scale = whole.scale
    if scale is not None and scale.dim():
        scale = scale[start:stop]
    return Decoded(whole.values[start:stop], scale)


@pytest.mark.parametrize("path", PATHS, ids=", ".join)
@settings(deadline=None, max_examples=5)
@given(
    st.lists(st.integers(1, ROWS - 1), max_size=12, unique=True),
    st.integers(0, 3),
    st.booleans(),
)
def test_rows_that_are_multiplied_apart_are_those_of_the_whole(
    path: tuple[str, str],
    products: dict[tuple[str, str], Specs],
    cuts: list[int],
    seed: int,
    biased: bool,
) -> None:
    specs = products[path]
    a = operand(specs[0], ROWS, seed)
    b = operand(specs[1], COLUMNS, seed + 10)
    bias = torch.randn(COLUMNS, generator=generated(seed)) if biased else None
    bounds = [0, *sorted(cuts), ROWS]

    def rows(start: int, stop: int) -> Tensor:
        return matmul(cut(a, start, stop), b, out_dtype=torch.bfloat16, bias=bias)

    apart = [rows(start, stop) for start, stop in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(apart), rows(0, ROWS))


def numbers_that_tell_the_order(in_turn: Callable[..., Tensor]) -> tuple[float, float, int]:
    """(a scale, another, an integer) whose product depends on what is multiplied first."""
    integers = torch.arange(1.0, 60_000)
    second = torch.tensor(0.0019)
    for first in torch.rand(64, generator=generated(0)):
        joint = (integers * (first * second)).bfloat16()
        different = (joint != in_turn(integers, first, second)).nonzero()
        if len(different):
            return float(first), float(second), int(integers[different[0]])
    raise AssertionError("no numbers tell the order")


def test_scales_of_rows_are_applied_in_turn_where_all_rows_have_one() -> None:
    def in_turn(sums: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (sums * first * second).bfloat16()

    first, second, sums = numbers_that_tell_the_order(in_turn)
    digits = torch.zeros(256, 32, dtype=torch.bfloat16)
    digits[:, 0], digits[:, 1] = divmod(sums, 256)
    b = torch.zeros(16, 32, dtype=torch.bfloat16)
    b[:, 0], b[:, 1] = 256, 1
    scales = torch.full((256, 1), first)
    y = matmul(Decoded(digits, scales), Decoded(b, torch.tensor(second)), out_dtype=torch.bfloat16)
    expected = in_turn(torch.tensor(float(sums)), torch.tensor(first), torch.tensor(second))
    assert torch.equal(y, expected.expand(256, 16))
