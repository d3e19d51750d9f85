"""The tensors and specs with which `gpu_kernels.py` checks the Triton kernels."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe
from fp4train.quantize import Delayed, Hadamard, QuantSpec, RandomKey
from fp4train.quantize.triton import has_pair_kernel

KEY = RandomKey(
    seed=(1 << 63) + 12345678901, step=77, layer=0xDEADBEEF, operand=3, row_offset=5, col_offset=16
)


def mx(element: str, scale_rounding: str = "rceil", rows: int = 1, **options: Any) -> QuantSpec:
    return QuantSpec(
        element=element,
        block=(rows, 32),
        scale="e8m0",
        scale_rounding=scale_rounding,
        global_scale=None,
        **options,
    )


def fp8(
    element: str, block: tuple[int | None, int | None], scale: str = "fp32", **options: Any
) -> QuantSpec:
    return QuantSpec(element=element, block=block, scale=scale, global_scale=None, **options)


SPECS: dict[str, QuantSpec] = {
    "nvfp4": QuantSpec(),
    "nvfp4 stochastic": QuantSpec(rounding="stochastic"),
    "nvfp4 hadamard": QuantSpec(hadamard=Hadamard()),
    "nvfp4 hadamard stochastic": QuantSpec(hadamard=Hadamard(), rounding="stochastic"),
    "nvfp4 16x16": QuantSpec(block=(16, 16)),
    "nvfp4 16x16 stochastic": QuantSpec(block=(16, 16), rounding="stochastic"),
    "nvfp4 te2.13": QuantSpec(formula="te2.13"),
    "nvfp4 per row": QuantSpec(global_scale="row"),
    "nvfp4 per row hadamard 8": QuantSpec(
        global_scale="row", hadamard=Hadamard(size=8, signs="random", seed=5)
    ),
    "nvfp4 guarded": QuantSpec(guard=16 / 17, global_bound=256.0, rounding="stochastic"),
    "mxfp8 e4m3": mx("e4m3"),
    "mxfp8 e4m3 stochastic": mx("e4m3", rounding="stochastic"),
    "mxfp8 e5m2 even": mx("e5m2", "even"),
    "mxfp8 e4m3 floor": mx("e4m3", "floor"),
    "mxfp8 32x32": mx("e4m3", rows=32),
    "mxfp6 e2m3 ceil": mx("e2m3", "ceil"),
    "mxfp6 e3m2": mx("e3m2"),
    "mxfp4 even": mx("e2m1", "even"),
    "mxfp4 hadamard 32": mx("e2m1", hadamard=Hadamard(size=32)),
    "fp8 tensor e4m3": fp8("e4m3", (None, None)),
    "fp8 tensor e5m2 stochastic": fp8("e5m2", (None, None), rounding="stochastic"),
    "fp8 delayed": fp8("e4m3", (None, None), delayed=Delayed(margin=1)),
    "fp8 per row pow2": fp8("e4m3", (1, None), "pow2"),
    "fp8 1x128": fp8("e4m3", (1, 128)),
    "fp8 1x128 pow2": fp8("e5m2", (1, 128), "pow2"),
    "fp8 128x128": fp8("e4m3", (128, 128)),
}

PIECES: dict[str, QuantSpec] = {
    "few bits": QuantSpec(rounding="stochastic_8", hadamard=Hadamard()),
    "guard": mx(
        "e2m1",
        "floor",
        guard=0.75,
        rounding="stochastic",
        hadamard=Hadamard(size=32, signs="step"),
    ),
    "away from zero": QuantSpec(rounding="nearest_away"),
    "ue5m3": QuantSpec(scale="ue5m3", global_scale=None),
    "ue5m3_ieee": QuantSpec(scale="ue5m3_ieee", held=50, rounding="stochastic_8_midpoint"),
    "macro": replace(mx("e2m1", "even", rows=32), global_scale="macro"),
    "tiles": QuantSpec(global_scale=(128, 128), rounding="stochastic", guard=16 / 17),
    "whole rows": QuantSpec(global_scale=(256, None), hadamard=Hadamard()),
    "integers": mx("int4", rounding="stochastic"),
    "hif4": QuantSpec(
        element="e1m2",
        block=(1, 64),
        scale="hif4",
        global_scale=None,
        rounding="nearest_away",
        hadamard=Hadamard(),
    ),
    "if4": QuantSpec(scale="if4", rounding="stochastic", guard=16 / 17),
    "if4 of weights": QuantSpec(scale="if4", block=(16, 16), formula="te2.13"),
}
"""What recipes of research add."""

IN_STEPS: dict[str, QuantSpec] = {
    "transform of 64": mx(
        "e2m1",
        "floor",
        guard=0.75,
        rounding="stochastic",
        hadamard=Hadamard(size=64, signs="step"),
    ),
    "requantised": QuantSpec(
        global_scale="block",
        rounding="stochastic",
        hadamard=Hadamard(signs="step"),
        requantises=QuantSpec(global_scale="block"),
    ),
}
"""What takes several steps (`quantize/triton_steps.py`)."""

PAIRS = (
    ("nvfp4", "nvfp4 hadamard"),
    ("nvfp4 stochastic", "nvfp4 hadamard stochastic"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "mxfp8 e4m3"),
    ("mxfp8 e4m3", "nvfp4 hadamard stochastic"),
    ("mxfp8 e4m3", "mxfp8 e4m3 stochastic"),
    ("mxfp4 even", "mxfp4 hadamard 32"),
    ("fp8 tensor e4m3", "fp8 tensor e4m3"),
    ("fp8 delayed", "fp8 delayed"),
)
"""Specs of the row-wise and the column-wise form of a tensor, whose codes one kernel makes."""


RECIPES: dict[str, Recipe] = {
    "nvfp4": NVFP4(),
    "mxfp8": MXFP8(),
    "fp8_current": FP8Current(),
    "fp8_delayed": FP8Delayed(),
}
"""Recipes whose launches a first visit checks."""

Shapes = Sequence[tuple[int, int]]
LAUNCHED: Shapes = ((256, 512), (33, 70))
"""Whole tiles; and an end within a tile, a row and a block."""


@dataclass(frozen=True)
class Case:
    """One tensor under one spec, or its codes by `spec` and those of its transpose by `column`."""

    name: str
    x: Tensor
    spec: QuantSpec
    key: RandomKey | None
    amax: Tensor | None
    column: QuantSpec | None = None


def content(kind: str, rows: int, cols: int, seed: int) -> Tensor:
    """float32 [rows, cols]: normal, wide (40 decades, zeros of both signs, subnormals), nan, inf,
    huge, tiny, grid.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "normal":
        return x
    if kind == "grid":  # values that lie on E2M1's grid, and ties between them
        return torch.randint(-24, 25, (rows, cols), generator=generator) * 0.25
    x *= torch.exp(6 * torch.randn(rows, cols, generator=generator))
    flat = x.view(-1)
    flat[::7] *= 1e-30
    flat[1::11] = 0.0
    flat[2::13] = -0.0
    flat[3::17] *= 1e-42
    x[0] = 0.0
    x[-1] *= 1e-40
    if kind == "nan":
        x[rows // 2, cols // 3] = torch.nan
    elif kind == "inf":
        x[rows // 2, cols // 3] = torch.inf
        x[rows // 3, 0] = -torch.inf
    return x * {"huge": 1e30, "tiny": 1e-30}.get(kind, 1.0)


def strided(
    name: str, shape: tuple[int, int], strides: str, kind: str, dtype: torch.dtype
) -> tuple[str, Tensor]:
    """The name of a case, and its tensor: as it is ("rows"), a transposed view ("columns"), or every
    other column of a wider tensor ("both").
    """
    rows, cols = shape
    seed = zlib.crc32(f"{name}{rows}{cols}{strides}".encode())
    if strides == "rows":
        x = content(kind, rows, cols, seed).to(dtype)
    elif strides == "columns":
        x = content(kind, cols, rows, seed).to(dtype).T
    else:
        x = content(kind, rows, 2 * cols, seed).to(dtype)[:, ::2]
    title = str(dtype).removeprefix("torch.")
    return f"{name} | {rows}x{cols} {strides} {kind} {title}", x


def turns(kinds: Sequence[str], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, torch.dtype]]:
    """The kinds and dtypes in turn, without end."""
    for dtype in cycle(dtypes):
        for kind in kinds:
            yield kind, dtype


def one_form(
    specs: dict[str, QuantSpec],
    shapes: Shapes,
    kinds: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> Iterator[Case]:
    """Every spec with every shape and all strides."""
    turn = turns(kinds, dtypes)
    places = product(specs.items(), shapes, ("rows", "columns", "both"))
    for count, ((name, spec), shape, strides) in enumerate(places, start=1):
        label, x = strided(name, shape, strides, *next(turn))
        takes_amax = spec.earlier_amax or (spec.global_scale == "tensor" and count % 4 == 0)
        amax = torch.tensor(3.0) if takes_amax else None
        yield Case(label, x, spec, KEY if spec.random else None, amax)


def cases(*, shapes: Shapes, kinds: Sequence[str], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Every spec by itself, and the pairs of both forms."""
    yield from one_form(SPECS, shapes, kinds, dtypes)
    turn = turns(kinds, dtypes)
    for (row, column), shape in product(PAIRS, shapes):
        label, x = strided(f"{row}, and {column} of x.T", shape, "rows", *next(turn))
        yield of_both_forms(label, x, SPECS[row], SPECS[column])


def of_both_forms(label: str, x: Tensor, row: QuantSpec, column: QuantSpec) -> Case:
    return Case(label, x, row, KEY, torch.tensor(3.0) if row.delayed else None, column)


def launched_cases(shapes: Shapes = LAUNCHED) -> list[Case]:
    """The cases of what a training run launches, derived from the recipes: x and dy in BF16 and w in
    float32, along the features and, as a view, along the tokens; and x and dy in both forms by one
    kernel. Of recipes that quantise an operand alike those of the first one.
    """
    launched: dict[object, Case] = {}
    for shape, (name, recipe) in product(shapes, RECIPES.items()):
        table = recipe.table()
        operands = {
            "x": (table["fprop"].first, table["wgrad"].second),
            "w": (table["fprop"].second, table["dgrad"].second),
            "dy": (table["dgrad"].first, table["wgrad"].first),
        }
        for operand, (row, column) in operands.items():
            assert row is not None and column is not None
            dtype = torch.float32 if operand == "w" else torch.bfloat16
            for spec, strides in ((row, "rows"), (column, "columns")):
                label, x = strided(f"{name} {operand}", shape, strides, "wide", dtype)
                amax = torch.tensor(3.0) if spec.delayed else None
                case = Case(label, x, spec, KEY if spec.random else None, amax)
                launched.setdefault((spec, strides, dtype, shape), case)
            if operand != "w" and has_pair_kernel(row, column):
                label, x = strided(f"{name} {operand}, both forms", shape, "rows", "wide", dtype)
                launched.setdefault((row, column, shape), of_both_forms(label, x, row, column))
    return list(launched.values())
