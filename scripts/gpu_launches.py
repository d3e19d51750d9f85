"""Launches of a training step of llama_1b, counted without a GPU:

    python scripts/gpu_launches.py [--out FILE.json]

What `gpu_recorded.py` records is counted: launches of fp4train's kernels, products, and operators of torch that are no
views. Each recipe's second step of a model of two blocks has so many more than that of one block; those of 16 blocks
that BF16 has not are added to what was measured of BF16 on an H200, whose norms, gates, rotations and loss are liger's:

    launches = 1,523 + 16 · (launches of a block - those of a block in BF16)

An operator counts as one launch, which is what elementwise operators, casts and fills take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gpu_profile
import torch
from gpu_recorded import Launches, Uncomputed, as_on_a_gpu, training_steps
from torch import Tensor

from fp4train.quantize.launch import Launch

BLOCKS = 16
MEASURED = 1523
"""Kernels of an eager step in BF16, in benchmarks/h200.json, without the range Optimizer.step."""
RECIPES: dict[str, tuple[str, ...]] = {
    "bf16": ("recipe=bf16",),
    "nvfp4": ("recipe=nvfp4", "backend=emulate"),
    "nvfp4, values kept": ("recipe=nvfp4", "backend=emulate", "train.keep_values=true"),
    "mxfp8": ("recipe=mxfp8", "backend=emulate"),
    "mxfp8, values kept": ("recipe=mxfp8", "backend=emulate", "train.keep_values=true"),
    "fp8_current": ("recipe=fp8_current", "backend=native"),
    "fp8_delayed": ("recipe=fp8_delayed", "backend=native"),
}
UNLAUNCHED = ("empty", "is_set_to", "profiler", "scalar_dense", "unsafe_view")


class StepLaunches(Launches):
    """The launches of the second step, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step

    def note(self, launch: Launch, *pointers: Tensor, words: tuple[Any, ...] = ()) -> None:
        kernel: Any = launch.kernel
        self.count(kernel.fn.__name__)

    def multiplied(self) -> None:
        self.count("product")

    def count(self, name: str) -> None:
        self.counts[name] += self.step == 1

    def operators(self) -> Operators:
        return Operators(self)


class Operators(Uncomputed):  # type: ignore[no-untyped-call]
    """`Uncomputed`, which counts operators that launch."""

    def __init__(self, launches: StepLaunches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if not function.is_view and not any(word in name for word in UNLAUNCHED):
            self.launches.count(name.split(".")[1])
        return super().__torch_dispatch__(function, types, args, kwargs)


def counted(words: tuple[str, ...], layers: int) -> Counter[str]:
    """The launches of a step of a model of so many blocks."""
    launches = StepLaunches()
    with as_on_a_gpu(launches, processors=132):
        keys = [*gpu_profile.MODEL, "train.microbatch=8", *words]
        training_steps(keys, layers, launches.operators, launches.begin)
    return launches.counts


def of_block(words: tuple[str, ...]) -> Counter[str]:
    """The launches of one block."""
    counts = counted(words, 2)
    counts.subtract(counted(words, 1))
    return counts


def launches_of_step(block: Counter[str], bf16: Counter[str]) -> int:
    """Of a whole step, by the launches of a block."""
    return MEASURED + BLOCKS * (block.total() - bf16.total())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args(words)
    bf16 = of_block(RECIPES["bf16"])
    rows = []
    for recipe in options.recipes:
        block = of_block(RECIPES[recipe])
        launches = launches_of_step(block, bf16)
        block.subtract(bf16)
        more = {name: count for name, count in sorted(block.items()) if count}
        rows.append({"recipe": recipe, "launches": launches, "of a block beside BF16's": more})
        print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        results = {"torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
