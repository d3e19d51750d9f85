"""Compare Transformer Engine with fp4train's emulation on this GPU: one command, run once on a new machine.

    python scripts/te_selfcheck.py [--out selfcheck.json] [--size 4096] [--no-timing] [--dry-run]

Four parts, each skipped with the reason where this machine cannot run it:

1. reference   TE's own pure-torch NVFP4 quantiser and block-by-block GEMM (any GPU that runs TE, Hopper too): y, dx and
               dw in float32 equal fp4train's to 1e-6 of their norm; and the same through TE's Linear layer in BF16.
2. native      each recipe on TE's kernels against emulation: operands rounded to nearest agree to 1e-2 of the norm: the
               same codes, another order of accumulation, BF16 output. Stochastic rounding draws other random bits, so
               there the distance from the unquantised product must agree with emulation's to 10 %.
3. weights     y, dx and dw of a layer whose weight fp4train's kernels quantise, as shards send it, equal in every bit
               those of one whose weight TE quantises; stochastic rounding, of dy, is left out.
4. time        of a forward and backward pass: TE, emulation, and torch in BF16.

Exit code 0: everything that ran agrees; 1: something does not; 3: nothing could run, and why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from te_problem import (
    NATIVE,
    REFERENCE,
    REFERENCE_BF16,
    STOCHASTIC,
    Problem,
    Products,
    Row,
    compare,
    distance,
    place,
)
from torch import Tensor, nn

from fp4train.backends import BACKENDS, Prepared, te as te_backend
from fp4train.backends.te import TEExecutor, availability
from fp4train.hardware import Device
from fp4train.nn import Linear
from fp4train.precision.context import autocast
from fp4train.precision.layer_plan import Gemm, LayerPlan
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import BF16, MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, Mixed
from fp4train.quantize import Decoded, QuantSpec, quantize

RECIPES: dict[str, Recipe] = {
    "nvfp4": NVFP4(),
    "nvfp4, nearest": NVFP4(stochastic_rounding=False),
    "nvfp4, nearest, no Hadamard": NVFP4(stochastic_rounding=False, hadamard=False),
    "nvfp4, plain": NVFP4(stochastic_rounding=False, hadamard=False, two_d_weights=False),
    "nvfp4, fprop in BF16": NVFP4(stochastic_rounding=False).with_high_precision("fprop"),
    "nvfp4, forward only": NVFP4().with_high_precision("dgrad", "wgrad"),
    "nvfp4, dequantised": NVFP4(backward="dequantised"),
    "nvfp4 forward, mxfp8 backward": Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
    "nvfp4, row-scaled": Mixed(
        fprop=NVFP4(row_scaled_activation=True),
        dgrad=NVFP4(stochastic_rounding=False),
        wgrad=NVFP4(stochastic_rounding=False),
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
    "fp8 blocks": FP8Block(),
}


DRY = ("nvfp4", "nvfp4, nearest", "mxfp8", "fp8 delayed")
"""The recipes of a dry run."""


def emulated(recipe: Recipe, problem: Problem, backend: str = "reference") -> Products:
    """y, dx, dw in float32; "reference" accumulates products block by block."""
    table = recipe.table()
    of_x, of_w = table["fprop"].both
    x = _values(problem.x, of_x) if table["wgrad"].dequantised else problem.x
    w = _values(problem.w, of_w) if table["dgrad"].dequantised else problem.w
    operands = {
        "fprop": (problem.x, problem.w),
        "dgrad": (problem.dy, w.T),
        "wgrad": (problem.dy.T, x.T),
    }
    y, dx, dw = (
        BACKENDS[backend].product(
            _codes(first, table[gemm].first),
            _codes(second, table[gemm].second),
            out_dtype=torch.float32,
        )
        for gemm, (first, second) in operands.items()
    )
    return y, dx, dw


def _values(x: Tensor, spec: QuantSpec | None) -> Tensor:
    assert spec is not None
    return quantize(x, spec).dequantize(x.dtype)


def _codes(x: Tensor, spec: QuantSpec | None) -> Prepared:
    return Decoded(x, None) if spec is None else quantize(x, spec)


def te_reference(problem: Problem) -> Products:
    """The same by TE's pure-torch NVFP4 quantiser and GEMM."""
    from transformer_engine.pytorch.custom_recipes.gemm import custom_gemm
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory
    from transformer_engine.pytorch.quantization import QuantizerRole

    def quantise(tensor: Tensor, kind: str) -> Any:
        role = QuantizerRole(module_type="linear", tensor_type=kind, name="selfcheck")
        return nvfp4_ref_rht_2d_factory(role).quantize(tensor)

    x = quantise(problem.x, "input")
    w = quantise(problem.w, "weight")
    dy = quantise(problem.dy, "grad_output")
    fp32 = torch.float32
    y = custom_gemm(w, x, None, fp32, layout="TN", grad=False)[0]
    dx = custom_gemm(w, dy, None, fp32, layout="NN", grad=True)[0]
    dw = custom_gemm(x, dy, None, fp32, layout="NT", grad=True)[0]
    return y, dx, dw


def run_layer(layer: Linear, recipe: Recipe, problem: Problem, steps: int = 1) -> Products:
    """y, dx, dw of the last of `steps` passes; delayed scaling has a history only after the
    first.
    """
    for step in range(steps):
        layer.weight.grad = None
        x = problem.x.detach().requires_grad_()
        with ExitStack() as stack:
            if layer.backend == "te" and any(spec.delayed for spec in recipe.table().specs()):
                # For delayed recipes only: a region asks TE whether this GPU runs the recipe, and
                # TE's pure-torch reference runs where its kernels do not.
                stack.enter_context(te_backend.region(recipe.table()))
            stack.enter_context(autocast(recipe, step=step))
            y = layer(x)
        y.backward(problem.dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


def layers(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> tuple[Linear, Linear]:
    """fp4train's layer by emulation and on TE, each with the problem's weights in `dtype`."""

    def linear() -> nn.Linear:
        plain = nn.Linear(
            problem.w.shape[1], problem.w.shape[0], bias=False, device=problem.w.device, dtype=dtype
        )
        with torch.no_grad():
            plain.weight.copy_(problem.w)
        return plain

    where = place(problem)
    return Linear.from_linear(linear(), where, "emulate"), Linear.from_linear(linear(), where, "te")


def why_not(recipe: Recipe, problem: Problem) -> str | None:
    """Why TE cannot run `recipe` here, or None."""
    return te_backend.why_not(recipe.table(), place(problem), Device.of(problem.w.device))


def run_on_te(layer: Linear, recipe: Recipe) -> None:
    """Let `layer` run `recipe` on TE whatever TE says of this GPU."""
    table = recipe.table()

    def gemm(name: str) -> Gemm:
        return Gemm(
            name=name, operands=table[name], dtype=recipe.dtype, backend="te", why="self-check"
        )

    plan = LayerPlan(
        layer=layer.layer,
        recipe=recipe,
        fprop=gemm("fprop"),
        dgrad=gemm("dgrad"),
        wgrad=gemm("wgrad"),
    )
    layer.apply_plan(plan, recipe, None, layer.weight.device)


def with_reference(layer: Linear, recipe: Recipe) -> Linear:
    """`layer` on TE's Linear with TE's pure-torch quantiser and GEMM, which need no FP4
    hardware.
    """
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory

    run_on_te(layer, recipe)
    layer.states["te"] = TEExecutor(
        name="selfcheck", translate=lambda _: CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory)
    )
    return layer


def check_reference(problem: Problem) -> list[Row]:
    """Part 1."""
    recipe = NVFP4(stochastic_rounding=False)
    rows = [
        compare(
            "reference",
            "NVFP4, float32",
            emulated(recipe, problem),
            te_reference(problem),
            REFERENCE,
        )
    ]
    ours, theirs = layers(problem)
    on_te = run_layer(with_reference(theirs, recipe), recipe, problem)
    by_emulation = run_layer(ours, recipe, problem)
    return [*rows, compare("reference", "te.Linear, BF16", by_emulation, on_te, REFERENCE_BF16)]


def check_native(name: str, recipe: Recipe, problem: Problem) -> Row:
    """Part 2 for one recipe."""
    ours, theirs = layers(problem, torch.float32)  # as training holds them
    steps = 3 if any(spec.delayed for spec in recipe.table().specs()) else 1
    by_emulation = run_layer(ours, recipe, problem, steps)
    on_te = run_layer(theirs, recipe, problem, steps)
    row = compare("native", name, by_emulation, on_te, NATIVE)
    stochastic = [
        any(s and s.rounding == "stochastic" for s in (o.first, o.second))
        for o in recipe.table().values()
    ]
    if not any(stochastic):
        return row
    exact = run_layer(Linear.from_linear(ours, ours.layer, "emulate"), BF16(), problem)
    values = []
    agree = []
    for random, a, b, truth in zip(stochastic, on_te, by_emulation, exact, strict=True):
        value = abs(distance(a, truth) / distance(b, truth) - 1) if random else distance(a, b)
        values.append(value)
        agree.append(value <= (STOCHASTIC if random else NATIVE))
    y, dx, dw = values
    note = "stochastic operands: relative difference of the two errors"
    tolerance = f"{NATIVE:g} or {STOCHASTIC:g}"
    return Row(
        part="native",
        name=name,
        y=y,
        dx=dx,
        dw=dw,
        tolerance=tolerance,
        agrees=all(agree),
        note=note,
    )


def milliseconds(step: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a step on the GPU."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return sorted(times)[repeats // 2]


def measure(problem: Problem, recipes: Mapping[str, Recipe] = RECIPES) -> Iterator[dict[str, Any]]:
    """Part 4: every recipe that runs on TE here, each as it is measured; what fails has its error
    for a time.
    """
    ours, theirs = layers(problem)

    def timed(layer: Linear, recipe: Recipe) -> float | str:
        try:
            return milliseconds(lambda: run_layer(layer, recipe, problem))
        except Exception as error:
            return first_line(error)

    baseline = timed(ours, BF16())
    yield {"name": "bf16 (torch)", "te_ms": None, "emulate_ms": None, "bf16_ms": baseline}
    for name, recipe in recipes.items():
        if why_not(recipe, problem) is None:
            on_te = timed(theirs, recipe)
            by_emulation = timed(ours, recipe)
            yield {"name": name, "te_ms": on_te, "emulate_ms": by_emulation, "bf16_ms": baseline}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def guarded(part: str, name: str, check: Callable[[], list[Row]]) -> list[Row]:
    """A check that breaks is a mismatch with the error as its note; the others still run."""
    try:
        return check()
    except Exception as error:
        return [Row(part=part, name=name, agrees=False, note=first_line(error))]


def checked(
    part: str,
    check: Callable[[str, Recipe, Problem], Row],
    name: str,
    recipe: Recipe,
    problem: Problem,
) -> list[Row]:
    """The row of one recipe, or why it is skipped."""
    reason = why_not(recipe, problem)
    return [Row(part=part, name=name, note=reason) if reason else check(name, recipe, problem)]


def show(rows: list[Row], times: list[dict[str, Any]]) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}"

    print(f"{'part':10} {'what':30} {'y':>8} {'dx':>8} {'dw':>8}  {'tolerance':12} result")
    for row in rows:
        result = {True: "agrees", False: "DIFFERS", None: "skipped"}[row.agrees]
        numbers = " ".join(f"{number(value):>8}" for value in (row.y, row.dx, row.dw))
        print(
            f"{row.part:10} {row.name:30} {numbers}  {row.tolerance:12} "
            f"{result}{': ' + row.note if row.note else ''}"
        )
    if times:
        print(f"\n{'forward and backward':30} {'TE ms':>9} {'emulate':>9} {'BF16':>9}")
        for time in times:
            cells = [time["te_ms"], time["emulate_ms"], time["bf16_ms"]]
            words = [
                "-" if c is None else c if isinstance(c, str) else format(c, ".3f") for c in cells
            ]
            print(f"{time['name']:30} " + " ".join(f"{word:>9}" for word in words))


def compared(
    machine: dict[str, Any],
    recipes: Mapping[str, Recipe],
    small: Problem,
    timed: Problem | None,
    out: Path | None,
) -> int:
    """All parts; returns the exit code.

    Args:
        machine: of the result.
        small: what is compared; timed: what is measured, or None.
        out: the result as JSON, written anew after each row: a crash of a kernel, which no
            exception tells, leaves what was found before.
    """
    from te_given import check_weights

    rows: list[Row] = []
    times: list[dict[str, Any]] = []

    def write() -> None:
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            result = {"machine": machine, "rows": [asdict(row) for row in rows], "times": times}
            out.write_text(json.dumps(result, indent=2) + "\n")

    write()
    rows += guarded("reference", "NVFP4", lambda: check_reference(small))
    write()
    parts = (
        ("native", check_native),
        ("weights", check_weights),
    )
    for part, check in parts:
        for name, recipe in recipes.items():
            rows += guarded(part, name, partial(checked, part, check, name, recipe, small))
            write()
    try:
        for time in measure(timed, recipes) if timed is not None else ():
            times.append(time)
            write()
    except Exception as error:
        rows.append(Row(part="time", name="all", agrees=False, note=first_line(error)))
    write()
    show(rows, times)
    broken = [
        t
        for t in times
        if any(isinstance(t[key], str) for key in ("te_ms", "emulate_ms", "bf16_ms"))
    ]
    return 1 if broken or any(row.agrees is False for row in rows) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--size", type=int, default=4096, help="tokens, in and out features of the timed layer"
    )
    parser.add_argument("--no-timing", action="store_true", help="compare only")
    parser.add_argument(
        "--dry-run", action="store_true", help="all parts in some recipes on a CPU, with stand-ins"
    )
    args = parser.parse_args(arguments)
    if args.dry_run:
        import gpu_stand_ins

        said = (__doc__ or "").split("\n\n")
        print("on a GPU:", *said[2:4], sep="\n")
        problem = Problem.draw(64, 96, 64, "cpu")
        with gpu_stand_ins.te_layers(sys.modules[__name__]):
            return compared(
                {"gpu": None}, {name: RECIPES[name] for name in DRY}, problem, problem, args.out
            )
    if not torch.cuda.is_available():
        print("te_selfcheck needs an NVIDIA GPU; torch sees none.", file=sys.stderr)
        return 3
    try:
        availability.pytorch_module()
    except ValueError as error:
        print(f"te_selfcheck: {error}", file=sys.stderr)
        return 3
    # The float32 products of the reference must be float32 products.
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "transformer_engine": availability.version_text(),
    }
    print(", ".join(str(value) for value in machine.values()))
    timed = None if args.no_timing else Problem.draw(args.size, args.size, args.size, "cuda")
    return compared(machine, RECIPES, Problem.draw(256, 512, 384, "cuda"), timed, args.out)


if __name__ == "__main__":
    sys.exit(main())
