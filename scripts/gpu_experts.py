"""Layers of experts on this GPU against emulation of the same recipe, and their times.

    python scripts/gpu_experts.py --backend native --out experts.json      torch's scaled_grouped_mm
    python scripts/gpu_experts.py --backend te --out experts-te.json       Transformer Engine's GroupedLinear

For each recipe that the backend runs here: y, dx and dw of eight experts with unequal numbers of tokens, one of them
without any, which must lie within BF16's rounding (1e-2 of the norm) of emulation's; which GEMMs multiply all experts
in one call; and the time of both and of BF16, forward and backward. Recipes round to nearest, so that Transformer
Engine's random bits do not count. Exit code 0: all agree; 1: one does not or fails; 3: no recipe runs so here, or there
is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import gpu_runs
import gpu_stand_ins
import te_problem
import te_selfcheck as selfcheck
import torch
from torch import Tensor

from fp4train.hardware import Device
from fp4train.nn import Experts
from fp4train.precision.context import autocast
from fp4train.precision.layer_plan import LayerPlan, resolve
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import BF16, MXFP8, NVFP4, FP8Current, FP8Row

RECIPES: dict[str, Recipe] = {
    "fp8 current": FP8Current(),
    "fp8 current, e4m3": FP8Current(element="e4m3"),
    "fp8 row": FP8Row(),
    "mxfp8": MXFP8(),
    "nvfp4, nearest": NVFP4(stochastic_rounding=False),
    "nvfp4, nearest, no Hadamard": NVFP4(stochastic_rounding=False, hadamard=False),
}
DRY = ("mxfp8", "nvfp4, nearest")
SHARES = (0.25, 0.0, 0.2, 0.15, 0.15, 0.1, 0.1, 0.05)
"""Of the tokens, by expert."""

Found = list[Tensor]


def layer(backend: str, size: int, device: str) -> Experts:
    """Experts with weights of different magnitude."""
    torch.manual_seed(0)
    made = Experts(len(SHARES), size, size, device=device, backend=backend)
    with torch.no_grad():
        made.weight *= torch.exp2(torch.arange(len(SHARES), device=device) - 4.0)[:, None, None]
    return made


def passes(experts: Experts, recipe: Recipe, x: Tensor, dy: Tensor, counts: list[int]) -> Found:
    """y, dx and dw."""
    experts.weight.grad, x = None, x.detach().requires_grad_()
    with autocast(recipe, step=1):
        y = experts(x, counts)
    y.backward(dy)
    assert x.grad is not None and experts.weight.grad is not None
    return [y.detach(), x.grad, experts.weight.grad]


def compare(
    name: str,
    recipe: Recipe,
    backend: str,
    size: int,
    device: str,
    planned: Callable[[Experts, Recipe], LayerPlan],
) -> dict[str, Any]:
    """The row of one recipe; `planned` resolves what the layer runs."""
    emulated = layer("emulate", size, device)
    tested = layer(backend, size, device)
    try:
        plan = planned(tested, recipe)
    except ValueError as error:
        return {"name": name, "ok": True, "agrees": None, "note": str(error)}
    tested.apply_plan(plan, recipe, None, tested.weight.device)
    generator = torch.Generator().manual_seed(1)
    x, dy = (
        torch.randn(size, size, generator=generator).to(device, torch.bfloat16) for _ in range(2)
    )
    counts = [int(share * size) for share in SHARES]
    try:
        ours, theirs = (passes(each, recipe, x, dy, counts) for each in (emulated, tested))
        distances = [te_problem.distance(a, b) for a, b in zip(theirs, ours, strict=True)]
        agrees = max(distances) <= te_problem.NATIVE
        row: dict[str, Any] = {"name": name, "ok": agrees, "agrees": agrees, "distances": distances}
        row |= {"one call": [gemm.name for gemm in plan.gemms if gemm.grouped]}
        if device == "cuda":
            cases = {
                f"{backend}_ms": (tested, recipe),
                "emulate_ms": (emulated, recipe),
                "bf16_ms": (emulated, BF16()),
            }
            for what, (each, own) in cases.items():
                row[what] = selfcheck.milliseconds(
                    functools.partial(passes, each, own, x, dy, counts)
                )
    except Exception as error:
        return {"name": name, "ok": False, "agrees": False, "note": selfcheck.first_line(error)}
    return row


def here(experts: Experts, recipe: Recipe) -> LayerPlan:
    """What the layer runs on this GPU."""
    return resolve(experts.layer, recipe, None, experts.backend, Device.of(experts.weight.device))


def dry_run(backend: str, results: gpu_runs.Results) -> int:
    """Two recipes on a CPU."""
    from fp4train.hardware import find_gpu

    b200 = Device.elsewhere(find_gpu("B200"))
    stand_in: AbstractContextManager[object] = nullcontext()
    if backend == "native":
        stand_in = gpu_stand_ins.grouped_products()
    else:
        gpu_stand_ins.announce(
            "a second emulated layer runs in the place of Transformer Engine's GroupedLinear"
        )

    def planned(experts: Experts, recipe: Recipe) -> LayerPlan:
        if backend == "native":
            return resolve(experts.layer, recipe, None, backend, b200)
        return here(experts, recipe)

    with stand_in:
        for name in DRY:
            results.add(
                compare(
                    name,
                    RECIPES[name],
                    "emulate" if backend == "te" else backend,
                    256,
                    "cpu",
                    planned,
                )
            )
    return results.code


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("native", "te"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--size", type=int, default=4096, help="tokens, in and out features")
    parser.add_argument(
        "--dry-run", action="store_true", help="two recipes on a CPU, with stand-ins"
    )
    given = parser.parse_args(words)
    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu_experts needs an NVIDIA GPU; torch sees none.", file=sys.stderr)
        return 3
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    if given.dry_run:
        return dry_run(given.backend, results)
    for name, recipe in RECIPES.items():
        if not results.has(name):
            results.add(compare(name, recipe, given.backend, given.size, "cuda", here))
    ran = [row for row in results.rows if row["agrees"] is not None]
    return results.code if ran else 3


if __name__ == "__main__":
    sys.exit(main())
