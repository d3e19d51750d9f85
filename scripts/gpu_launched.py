"""The cases of what a training run launches, derived from the recipes: `gpu_kernels.py --launched` checks them on a
GPU, and a cache of compiled kernels holds theirs.

Of each recipe: x and dy in BF16 and w in float32, along the features and, as a view, along the tokens; and x and dy in
both forms by one kernel. One shape is of whole tiles, the other one ends within a tile, a row and a block.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from gpu_cases import KEY, Case, content

from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe
from fp4train.quantize import QuantSpec
from fp4train.quantize.triton import has_pair_kernel

Shapes = tuple[tuple[int, int], ...]

RECIPES: dict[str, Recipe] = {
    "nvfp4": NVFP4(),
    "mxfp8": MXFP8(),
    "fp8_current": FP8Current(),
    "fp8_delayed": FP8Delayed(),
}
SHAPES: Shapes = ((256, 512), (33, 70))


def launched_cases(shapes: Shapes = SHAPES) -> list[Case]:
    """The cases, one shape after the other; of recipes that quantise an operand alike the first
    one's.
    """
    cases: dict[object, Case] = {}
    for shape in shapes:
        for name, recipe in RECIPES.items():
            for kind, case in recipe_cases(name, recipe, shape):
                cases.setdefault((kind, shape), case)
    return list(cases.values())


def recipe_cases(
    name: str, recipe: Recipe, shape: tuple[int, int]
) -> Iterator[tuple[object, Case]]:
    """(kind of launch, case) of the operands of a recipe."""
    table = recipe.table()
    operands = {
        "x": (table["fprop"].first, table["wgrad"].second),
        "w": (table["fprop"].second, table["dgrad"].second),
        "dy": (table["dgrad"].first, table["wgrad"].first),
    }
    for operand, (row, column) in operands.items():
        if row is None or column is None:
            continue
        label = f"{name} {operand}"
        dtype = torch.float32 if operand == "w" else torch.bfloat16
        for spec, strides in ((row, "rows"), (column, "columns")):
            yield (spec, strides, dtype), of_one_form(label, spec, strides, dtype, shape)
        if operand != "w" and has_pair_kernel(row, column):
            yield (row, column), of_both_forms(label, row, column, shape)


def of_one_form(
    label: str, spec: QuantSpec, strides: str, dtype: torch.dtype, shape: tuple[int, int]
) -> Case:
    """A tensor whose rows, or whose columns, are contiguous."""
    rows, cols = shape
    name = f"{label} | {rows}x{cols} {strides} {str(dtype).removeprefix('torch.')}"
    seed = zlib.crc32(name.encode())
    in_rows = strides == "rows"
    x = content("wide", *shape, seed) if in_rows else content("wide", cols, rows, seed).T
    key = KEY if spec.rounding == "stochastic" else None
    return Case(name, x.to(dtype), spec, key, delayed_amax(spec))


def of_both_forms(label: str, row: QuantSpec, column: QuantSpec, shape: tuple[int, int]) -> Case:
    """A tensor whose codes, and those of its transpose, one kernel makes."""
    name = f"{label}, both forms | {shape[0]}x{shape[1]}"
    x = content("wide", *shape, zlib.crc32(name.encode())).bfloat16()
    return Case(name, x, row, KEY, delayed_amax(row), column)


def delayed_amax(spec: QuantSpec) -> torch.Tensor | None:
    """The amax that a history gives; None: it is measured."""
    return None if spec.delayed is None else torch.tensor(3.0)
