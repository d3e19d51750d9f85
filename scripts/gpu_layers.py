"""Layers on this GPU's own products, or on Transformer Engine's (TE), against emulation of the same recipe:

    python scripts/gpu_layers.py native --out NAME-native.json     torch's scaled_mm and scaled_grouped_mm
    python scripts/gpu_layers.py te --out NAME-te.json             Transformer Engine

Each recipe that the backend runs here, in a layer and in eight experts with unequal numbers of tokens, one without any:

    y, dx, dw     distances from emulation's, which must lie within 1e-2 of its norm: the codes are the same, and sums
                  have another order. TE draws other random bits; where it does, its distance from the product in BF16
                  must be emulation's to 10 %
    one call      of experts: the GEMMs that multiply all of them in one call
    ms            a forward and backward pass, also of emulation and of BF16

With TE also the float32 products of its own pure-torch quantiser of NVFP4 (`reference`), which must be emulation's to
1e-6, and layers whose weight fp4train's kernels quantise, as shards send it (`weights`), which must have the bits of
those whose weight TE quantises.

Rows are written as they come. Exit code 0: all that ran agree; 1: one does not; 3: nothing could run, or there is no
GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpu_results
import gpu_stand_ins
import torch
from torch import Tensor, nn

from fp4train.backends import BACKENDS, KernelCall, Prepared, te as te_backend
from fp4train.backends.te import TRANSFORMER_ENGINE, TEExecutor
from fp4train.hardware import Device
from fp4train.nn import Experts, Linear
from fp4train.precision.context import autocast
from fp4train.precision.layer_plan import LayerPlan, resolve
from fp4train.precision.layers import Layer
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
from fp4train.quantize import Decoded, QuantSpec, quantize, quantizer

NEAREST = NVFP4(stochastic_rounding=False)
RECIPES: dict[str, Recipe] = {
    "nvfp4": NVFP4(),
    "nvfp4, nearest": NEAREST,
    "nvfp4, nearest, no Hadamard": NVFP4(stochastic_rounding=False, hadamard=False),
    "nvfp4, plain": NVFP4(stochastic_rounding=False, hadamard=False, two_d_weights=False),
    "nvfp4, fprop in BF16": NEAREST.with_high_precision("fprop"),
    "nvfp4, forward only": NVFP4().with_high_precision("dgrad", "wgrad"),
    "nvfp4, dequantised": NVFP4(backward="dequantised"),
    "nvfp4 forward, mxfp8 backward": Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
    "nvfp4, row-scaled": NVFP4(row_scaled_activation=True, stochastic_rounding=False),
    "nvfp4, row-scaled in fprop": Mixed(
        fprop=NVFP4(row_scaled_activation=True), dgrad=NEAREST, wgrad=NEAREST
    ),
    "nvfp4, four-over-six": NVFP4(four_over_six="all", hadamard=False, stochastic_rounding=True),
    "mxfp8": MXFP8(),
    "mxfp8, hybrid": MXFP8(element="hybrid"),
    "mxfp8, 2D weights": MXFP8(two_d_weights=True),
    "mxfp8, fprop in BF16": MXFP8().with_high_precision("fprop"),
    "mxfp8, dequantised": MXFP8(backward="dequantised"),
    "fp8 current": FP8Current(),
    "fp8 current, e4m3, 2^k": FP8Current(element="e4m3", power_of_two=True),
    "fp8 current, fprop in BF16": FP8Current().with_high_precision("fprop"),
    "fp8 delayed": FP8Delayed(history=4),
    "fp8 row": FP8Row(),
    "fp8 blocks": FP8Block(),
    "fp8 blocks, scales in float32": FP8Block(power_of_two=False),
}
DRY = ("nvfp4", "nvfp4, nearest", "mxfp8", "fp8 blocks")
"""The recipes of a dry run."""
SHARES = (0.25, 0.0, 0.2, 0.15, 0.15, 0.1, 0.1, 0.05)
"""Of the tokens, by expert."""
REFERENCE = 1e-6
TOLERANCE = 1e-2
STOCHASTIC = 0.1
"""Tolerances: relative to the norm; the last one relative between two quantisation errors."""
STEPS = 3
"""Passes of a layer, of which the last counts: delayed scaling has a history only after the first."""

Products = tuple[Tensor, Tensor, Tensor]
"""y, dx and dw."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [M, K], w [N, K], dy [M, N] in BF16."""

    x: Tensor
    w: Tensor
    dy: Tensor

    @staticmethod
    def draw(tokens: int, in_features: int, out_features: int, device: str) -> Problem:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

        x = normal(tokens, in_features)
        x[:, ::97] *= 20  # outlier channels, as activations have
        return Problem(x=x, w=normal(out_features, in_features), dy=normal(tokens, out_features))

    @property
    def layer(self) -> Layer:
        out_features, in_features = self.w.shape
        return Layer(
            name="layer", in_features=in_features, out_features=out_features, block=0, blocks=1
        )

    @property
    def counts(self) -> list[int]:
        """Tokens of the experts."""
        return [int(share * len(self.x)) for share in SHARES]


AnyLayer = Linear | Experts
Make = Callable[[Problem, str], AnyLayer]


def linear(problem: Problem, backend: str) -> Linear:
    """A layer with the problem's weight, in float32 as training holds it."""
    plain = nn.Linear(problem.w.shape[1], problem.w.shape[0], bias=False, device=problem.w.device)
    with torch.no_grad():
        plain.weight.copy_(problem.w)
    return Linear.from_linear(plain, problem.layer, backend)


def experts(problem: Problem, backend: str) -> Experts:
    """Experts with weights of different magnitude."""
    sizes = (len(SHARES), problem.w.shape[1], problem.w.shape[0])
    group = Experts(*sizes, device=problem.w.device, backend=backend)
    powers = torch.exp2(torch.arange(len(SHARES), device=problem.w.device) - 4.0)
    with torch.no_grad():
        group.weight.copy_(powers[:, None, None] * problem.w)
    return group


def passes(layer: AnyLayer, recipe: Recipe, problem: Problem, steps: int = STEPS) -> Products:
    """y, dx, dw of the last of `steps` passes."""
    counts = [problem.counts] if isinstance(layer, Experts) else []
    for step in range(steps):
        layer.weight.grad = None
        x = problem.x.detach().requires_grad_()
        with ExitStack() as stack:
            if layer.backend == "te" and delayed(recipe):
                stack.enter_context(te_backend.region(recipe.table()))
            stack.enter_context(autocast(recipe, step=step))
            y = layer(x, *counts)
        y.backward(problem.dy)
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


def delayed(recipe: Recipe) -> bool:
    return any(spec.delayed is not None for spec in recipe.table().specs())


def stochastic(recipe: Recipe) -> list[bool]:
    """Whether the operands of each GEMM take random bits."""
    operands = recipe.table().values()
    return [any(spec is not None and spec.random for spec in pair.both) for pair in operands]


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖ in float64; NaN anywhere gives NaN, which no tolerance passes."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def compared(ours: Products, theirs: Products, tolerance: float) -> dict[str, Any]:
    distances = [distance(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {"ok": all(value <= tolerance for value in distances), "distances": distances}


def plan_here(layer: AnyLayer, recipe: Recipe) -> LayerPlan:
    """What the layer runs on this GPU."""
    return resolve(layer.layer, recipe, None, layer.backend, Device.of(layer.weight.device))


def compare(
    make: Make, recipe: Recipe, backend: str, problem: Problem, timed: Problem | None
) -> dict[str, Any]:
    """The row of one recipe: "left out" says why the backend does not run it here.

    Args:
        timed: the problem whose passes are timed; None: none are.
    """
    layer = make(problem, backend)
    try:
        plan = plan_here(layer, recipe)
    except ValueError as error:
        return {"left out": str(error)}
    layer.apply_plan(plan, recipe, None, layer.weight.device)
    emulated = make(problem, "emulate")
    ours = passes(layer, recipe, problem)
    theirs = passes(emulated, recipe, problem)
    row = compared(ours, theirs, TOLERANCE)
    if backend == "te" and any(stochastic(recipe)):
        exact = passes(make(problem, "emulate"), BF16(), problem, steps=1)
        row = compared_errors(stochastic(recipe), ours, theirs, exact)
    if isinstance(layer, Experts):
        row["one call"] = [gemm.name for gemm in plan.gemms if gemm.grouped]
    if timed is not None:
        layer = make(timed, backend)
        emulated = make(timed, "emulate")
        layer.apply_plan(plan, recipe, None, layer.weight.device)
        row["ms"] = timed_pass(layer, recipe, timed)
        row["emulated ms"] = timed_pass(emulated, recipe, timed)
        row["bf16 ms"] = timed_pass(emulated, BF16(), timed)
    return row


def timed_pass(layer: AnyLayer, recipe: Recipe, problem: Problem) -> float:
    return gpu_results.milliseconds(partial(passes, layer, recipe, problem, steps=1))


def compared_errors(
    random: Sequence[bool], ours: Products, theirs: Products, exact: Products
) -> dict[str, Any]:
    """Of GEMMs with random bits the relative difference of the distances from the exact product."""
    values = []
    agree = []
    for is_random, a, b, truth in zip(random, ours, theirs, exact, strict=True):
        if is_random:
            value = abs(distance(a, truth) / distance(b, truth) - 1)
            tolerance = STOCHASTIC
        else:
            value = distance(a, b)
            tolerance = TOLERANCE
        values.append(value)
        agree.append(value <= tolerance)
    return {"ok": all(agree), "distances": values, "random": list(random)}


def emulated_products(recipe: Recipe, problem: Problem, backend: str = "reference") -> Products:
    """y, dx, dw in float32; "reference" accumulates products block by block."""
    table = recipe.table()

    def prepared(x: Tensor, spec: QuantSpec | None) -> Prepared:
        return Decoded(x, None) if spec is None else quantize(x, spec)

    operands = {
        "fprop": (problem.x, problem.w),
        "dgrad": (problem.dy, problem.w.T),
        "wgrad": (problem.dy.T, problem.x.T),
    }
    y, dx, dw = (
        BACKENDS[backend].product(
            prepared(left, table[gemm].first),
            prepared(right, table[gemm].second),
            out_dtype=torch.float32,
        )
        for gemm, (left, right) in operands.items()
    )
    return y, dx, dw


def te_reference(problem: Problem) -> Products:
    """The same by TE's pure-torch NVFP4 quantiser and GEMM."""
    from transformer_engine.pytorch.custom_recipes.gemm import custom_gemm
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory
    from transformer_engine.pytorch.quantization import QuantizerRole

    def quantised(tensor: Tensor, kind: str) -> Any:
        role = QuantizerRole(module_type="linear", tensor_type=kind, name="layer")
        return nvfp4_ref_rht_2d_factory(role).quantize(tensor)

    x = quantised(problem.x, "input")
    w = quantised(problem.w, "weight")
    dy = quantised(problem.dy, "grad_output")
    fp32 = torch.float32
    y = custom_gemm(w, x, None, fp32, layout="TN", grad=False)[0]
    dx = custom_gemm(w, dy, None, fp32, layout="NN", grad=True)[0]
    dw = custom_gemm(x, dy, None, fp32, layout="NT", grad=True)[0]
    return y, dx, dw


def reference_row(problem: Problem) -> dict[str, Any]:
    return compared(te_reference(problem), emulated_products(NEAREST, problem), REFERENCE)


def weights_row(recipe: Recipe, problem: Problem) -> dict[str, Any]:
    """The row of a layer of TE whose weight fp4train's kernels quantise; "left out" says why none
    do, or why bits differ.
    """
    table = recipe.table()
    if delayed(recipe) or any(stochastic(recipe)):
        return {"left out": "random bits or histories differ"}
    try:
        plan_here(linear(problem, "te"), recipe)
    except ValueError as error:
        return {"left out": str(error)}
    reason = TRANSFORMER_ENGINE.why_values(table, problem.layer, Device.of(problem.w.device))
    if reason is not None:
        return {"left out": reason}

    def products(*, given: bool) -> Products:
        weight = problem.w.float().requires_grad_()
        x = problem.x.detach().requires_grad_()

        def codes(column: bool) -> Prepared:
            spec = table["fprop"].second
            values = weight.detach()
            if column:
                spec = table["dgrad"].second
                values = values.T
            if spec is None:
                return Decoded(values.to(table.torch_dtype), None)
            return quantizer(spec, values.device.type).codes(values)

        layer = TEExecutor(name="layer")
        y = layer(x, weight, None, table, KernelCall(freed=given, codes=codes if given else None))
        y.backward(problem.dy)  # type: ignore[no-untyped-call]
        assert x.grad is not None and weight.grad is not None
        return y.detach(), x.grad, weight.grad

    return compared(products(given=True), products(given=False), 0.0)


def check(
    results: gpu_results.Results,
    backend: str,
    recipes: dict[str, Recipe],
    problem: Problem,
    timed: Problem | None,
) -> int:
    """All rows; the exit code."""
    if backend == "te":
        results.measure("reference", partial(reference_row, problem))
    for name, recipe in recipes.items():
        results.measure(name, partial(compare, linear, recipe, backend, problem, timed))
        if backend == "te":
            results.measure(f"weights, {name}", partial(weights_row, recipe, problem))
        if backend == "native" or not any(stochastic(recipe)):
            row = partial(compare, experts, recipe, backend, problem, timed)
            results.measure(f"experts, {name}", row)
    ran = [row for row in results.rows if "left out" not in row]
    return results.code if ran else 3


def dry_run(results: gpu_results.Results, backend: str) -> int:
    """Some recipes on a CPU."""
    problem = Problem.draw(64, 128, 96, "cpu")
    recipes = {name: RECIPES[name] for name in DRY}
    stand_ins = {"te": gpu_stand_ins.te_layers, "native": gpu_stand_ins.native_layers}
    with stand_ins[backend](sys.modules[__name__]):
        return check(results, backend, recipes, problem, problem)


def main(words: list[str] | None = None) -> int:
    parser = gpu_results.options(__doc__)
    parser.add_argument("backend", choices=("native", "te"))
    parser.add_argument("--size", type=int, default=4096, help="features of the timed layers")
    parser.add_argument("--only", default="", help="recipes whose names have this word")
    parser.add_argument("--no-timing", action="store_true", help="compare only")
    options, results = gpu_results.begin(parser, words)
    if options.dry_run:
        return dry_run(results, options.backend)
    # The float32 products of the reference must be float32 products.
    torch.backends.cuda.matmul.allow_tf32 = False
    size = options.size
    timed = None if options.no_timing else Problem.draw(size, size, size, "cuda")
    small = Problem.draw(256, 512, 384, "cuda")
    recipes = {name: recipe for name, recipe in RECIPES.items() if options.only in name}
    return check(results, options.backend, recipes, small, timed)


if __name__ == "__main__":
    sys.exit(main())
