"""Backend of each recipe on this machine, and small computations of it against the reference.

A layer of 256 features takes 128 tokens forward and backward through what
`precision.layer_plan.resolve` decides. Each of the recipe's quantisers takes one tensor. The
kernels' codes must equal the readable reference's to the bit; y, dx and dw must lie within BF16's
rounding of the reference product, where both draw the same random bits. The same layer is then tried
as before the first step of a run (`audit.start.LayerTrial`): each operand of one call is made again.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor, nn

from fp4train.audit.start import LayerTrial, drawn
from fp4train.backends import LAYER_BACKENDS
from fp4train.errors import named
from fp4train.hardware import Device, gpus
from fp4train.nn import Linear
from fp4train.precision.context import autocast
from fp4train.precision.layer_plan import Gemm, LayerPlan, resolve
from fp4train.precision.layers import Layer
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import BF16
from fp4train.quantize import quantizer

FEATURES = 256
TOKENS = 128
SAMPLE = Layer(name="sample", in_features=FEATURES, out_features=FEATURES, block=0, blocks=1)
CLOSE = 1e-2
"""Distance of products relative to the norm: BF16's rounding."""

ALIKE = 2.0
"""Largest ratio of two distances from the product in BF16, TE's and ours, where TE draws other
random bits.
"""

WORDS = {"te": "TE", "emulate": "emulated"}
"""Backend → its word in the table, where that is not its name."""
KERNELS = {"cpu": "C", "triton": "Triton", "reference": "torch"}
ELSEWHERE = ("A100", "H100", "B200")
"""GPUs whose answer stands for their generation."""


@dataclass(kw_only=True)
class RecipeCheck:
    """One recipe.

    Args:
        name: name that `recipe=` takes.
        runs: backends that its GEMMs run on here: "TE", "native", "emulated", "torch", or several.
        why: reasons of the plan for the backends of its quantised GEMMs.
        kernels: kernels that quantise its operands: "C", "Triton", or "torch", the readable
            reference.
        codes: whether they equal the reference; None: it quantises nothing.
        distance: largest distance of y, dx and dw from the reference; None: it failed earlier.
        native_on: GPUs that run all its GEMMs on their own kernels.
        problem: sentence about what is wrong, or None.
        scaled: largest distance on backend=native, torch's scaled_mm; None: it cannot run the
            recipe here.
        scaled_why: reason why it cannot.
        scaled_problem: sentence about what is wrong with it, or None.
    """

    name: str
    runs: str = "-"
    why: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    codes: bool | None = None
    distance: float | None = None
    native_on: tuple[str, ...] = ()
    problem: str | None = None
    scaled: float | None = None
    scaled_why: str | None = None
    scaled_problem: str | None = None


def check_all(
    recipes: Mapping[str, Recipe], device: Device, processes: int = 1
) -> tuple[RecipeCheck, ...]:
    """Try every recipe, in so many processes: on a GPU each has kernels to be compiled, seconds on
    one core.
    """
    if processes == 1:
        return tuple(check(name, recipe, device) for name, recipe in recipes.items())
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {
            name: pool.submit(check, name, recipe, device) for name, recipe in recipes.items()
        }
        return tuple(_outcome(name, future) for name, future in futures.items())


def _outcome(name: str, future: Future[RecipeCheck]) -> RecipeCheck:
    try:
        return future.result()
    except BrokenProcessPool:  # of a driver: it ends all that are under way
        return RecipeCheck(name=name, problem="a process that tried recipes crashed")


def _word(gemm: Gemm) -> str:
    """The backend of a GEMM, as the table has it."""
    return WORDS.get(gemm.backend, gemm.backend)


def check(name: str, recipe: Recipe, device: Device) -> RecipeCheck:
    """Resolve and run one recipe; what fails is a problem, not an exception."""
    outcome = RecipeCheck(name=name)
    try:
        plan = resolve(SAMPLE, recipe, None, "auto", device)
    except ValueError as error:
        outcome.problem = str(error)
        return outcome
    outcome.runs = " + ".join(dict.fromkeys(map(_word, plan.gemms)))
    outcome.why = tuple(dict.fromkeys(gemm.why for gemm in plan.gemms if gemm.operands.quantised))
    elsewhere = (gpu for gpu in gpus() if gpu.name in ELSEWHERE)
    outcome.native_on = tuple(
        gpu.name for gpu in elsewhere if _native(recipe, Device.elsewhere(gpu))
    )
    trial = LayerTrial(plan, device.type, (FEATURES, FEATURES))
    try:
        if specs := plan.specs:
            outcome.kernels = tuple(
                dict.fromkeys(KERNELS[quantizer(spec, device.type).kernel] for spec in specs)
            )
            wrong = trial.quantiser_faults()
            outcome.codes = not wrong
            if wrong:
                kernels = ", ".join(outcome.kernels)
                outcome.problem = (
                    f"{kernels} quantise {wrong[0].layer} otherwise than the reference"
                )
        outcome.distance, far = products(recipe, plan, device)
        outcome.problem = outcome.problem or far
        if outcome.problem is None:
            outcome.problem = next((str(fault) for fault in trial.call_faults()), None)
    # of a driver, a compiler, a missing library: to be reported, whatever it is
    except Exception as error:
        outcome.problem = named(error)
    if plan.quantised:
        _try_scaled(outcome, recipe, device)
    return outcome


def _try_scaled(outcome: RecipeCheck, recipe: Recipe, device: Device) -> None:
    """Try the sample layer on backend=native, and note the result in `outcome`."""
    try:
        plan = resolve(SAMPLE, recipe, None, "native", device)
    except ValueError as error:
        outcome.scaled_why = str(error)
        return
    try:
        outcome.scaled, problem = products(recipe, plan, device, "native")
    except Exception as error:  # of a driver, of cuBLAS
        problem = named(error)
    outcome.scaled_problem = problem and f"backend=native: {problem}"


def _native(recipe: Recipe, device: Device) -> bool:
    plan = resolve(SAMPLE, recipe, None, "auto", device)
    return all(gemm.backend != "emulate" for gemm in plan.gemms)


def products(
    recipe: Recipe, plan: LayerPlan, device: Device, backend: str = "auto"
) -> tuple[float, str | None]:
    """(the largest distance of y, dx and dw from the reference, what is wrong with it or None)."""
    measured = _run(recipe, device.type, backend)
    reference = _run(recipe, "cpu", "reference")
    if plan.layer_backend is None or not any(spec.random for spec in plan.table.specs()):
        distance = max(_distance(a, b) for a, b in zip(measured, reference, strict=True))
        close = distance <= CLOSE
    else:
        exact = _run(BF16(), "cpu", "reference")
        errors = [
            (_distance(a, c), _distance(b, c))
            for a, b, c in zip(measured, reference, exact, strict=True)
        ]
        distance = max(abs(a - b) for a, b in errors)
        close = all(a <= ALIKE * b + CLOSE and b <= ALIKE * a + CLOSE for a, b in errors)
    if close:
        return distance, None
    return distance, f"y, dx or dw lie {distance:.1e} from the reference"


def _run(recipe: Recipe, device: str, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of the sample layer."""
    linear = nn.Linear(FEATURES, FEATURES, bias=False)
    with torch.no_grad():
        linear.weight.copy_(drawn(FEATURES, FEATURES, seed=2) / FEATURES**0.5)
    layer = Linear.from_linear(linear.to(device), SAMPLE, backend)
    x = drawn(TOKENS, FEATURES, seed=3).to(torch.bfloat16).to(device).requires_grad_()
    dy = drawn(TOKENS, FEATURES, seed=4).to(torch.bfloat16).to(device)
    layer_backend = resolve(SAMPLE, recipe, None, backend, Device.of(device)).layer_backend
    region: AbstractContextManager[object] = nullcontext()
    if layer_backend is not None:
        region = LAYER_BACKENDS[layer_backend].region([recipe.table()], None)
    with region, autocast(recipe, step=0):
        y = layer(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖; NaN anywhere gives infinity, which no tolerance passes."""
    distance = float((a.double() - b.double()).norm() / b.double().norm())
    if distance == distance:
        return distance
    return float("inf")
