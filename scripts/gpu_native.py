"""torch's scaled products on this GPU against emulation of the same recipe, and their times.

    python scripts/gpu_native.py --out native.json

For each recipe that `backend=native` runs here in all its quantised GEMMs: y, dx and dw of a layer, which must lie
within BF16's rounding (1e-2 of the norm) of emulation's, and the time of both and of BF16, forward and backward.
Exit code 0: all agree; 1: one does not or fails; 3: no recipe runs natively here, or there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import gpu_stand_ins
import te_problem
import te_selfcheck as selfcheck
import torch

from fp4train.backends import choose
from fp4train.hardware import Device
from fp4train.nn import Linear
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
    Mixed,
)

RECIPES: dict[str, Recipe] = {
    "fp8 current": FP8Current(),
    "fp8 current, e4m3": FP8Current(element="e4m3"),
    "fp8 current, fprop in BF16": FP8Current().with_high_precision("fprop"),
    "fp8 delayed": FP8Delayed(history=4),
    "fp8 row": FP8Row(),
    "fp8 blocks": FP8Block(),
    "fp8 blocks, scales in float32": FP8Block(power_of_two=False),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
    "nvfp4, plain": NVFP4(stochastic_rounding=False, hadamard=False, two_d_weights=False),
    "nvfp4, row-scaled": NVFP4(row_scaled_activation=True, stochastic_rounding=False),
    "nvfp4 forward, mxfp8 backward": Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
}
DRY = ("mxfp8", "nvfp4", "fp8 blocks")
"""The recipes of a dry run: one of each layout of scales."""


def compare(
    name: str, recipe: Recipe, problem: te_problem.Problem, *, timed: bool
) -> dict[str, Any]:
    """One line of the result."""
    try:
        choose(recipe.table(), te_problem.place(problem), "native", Device.of(problem.w.device))
    except ValueError as error:
        return {"name": name, "agrees": None, "note": str(error)}
    emulated, plain = selfcheck.layers(problem, torch.float32)
    native = Linear.from_linear(plain, plain.layer, "native")
    try:
        ours, theirs = (
            selfcheck.run_layer(layer, recipe, problem, steps=2) for layer in (emulated, native)
        )
        distances = [te_problem.distance(a, b) for a, b in zip(theirs, ours, strict=True)]
        row: dict[str, Any] = {
            "name": name,
            "agrees": max(distances) <= te_problem.NATIVE,
            "distances": distances,
        }
        if timed:
            cases = {
                "native_ms": (native, recipe),
                "emulate_ms": (emulated, recipe),
                "bf16_ms": (emulated, BF16()),
            }
            for what, (layer, each) in cases.items():
                step = functools.partial(selfcheck.run_layer, layer, each, problem)
                row[what] = selfcheck.milliseconds(step)
    except Exception as error:
        return {"name": name, "agrees": False, "note": selfcheck.first_line(error)}
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--size", type=int, default=4096, help="tokens, in and out features of the layer"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="three recipes on a CPU, with recorded products"
    )
    args = parser.parse_args(arguments)
    if args.dry_run:
        with gpu_stand_ins.scaled_products() as calls:
            problem = te_problem.Problem.draw(128, 256, 128, "cpu")
            dry_rows = [compare(name, RECIPES[name], problem, timed=False) for name in DRY]
        print(*map(json.dumps, dry_rows), f"{len(calls)} calls of scaled_mm", sep="\n")
        return 0 if all(row["agrees"] for row in dry_rows) else 1
    if not torch.cuda.is_available():
        print("gpu_native needs an NVIDIA GPU; torch sees none.", file=sys.stderr)
        return 3
    problem = te_problem.Problem.draw(args.size, args.size, args.size, "cuda")
    rows: list[dict[str, Any]] = []
    for name, recipe in RECIPES.items():
        rows.append(compare(name, recipe, problem, timed=True))
        print(json.dumps(rows[-1]))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            args.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    found = [row["agrees"] for row in rows]
    return 1 if False in found else 0 if True in found else 3


if __name__ == "__main__":
    sys.exit(main())
