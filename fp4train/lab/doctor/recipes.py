"""Backend of each recipe on this machine, and its kernels against the reference.

Each of the recipe's quantisers takes one tensor: the kernels' codes must equal the readable
reference's to the bit (`audit.start.LayerTrial`). Products are tried before the first step of a run.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from fp4train.audits.start import LayerTrial
from fp4train.errors import named
from fp4train.hardware import Device, gpus
from fp4train.precision.layer_plan import Gemm, resolve
from fp4train.precision.layers import Layer
from fp4train.precision.recipe import Recipe
from fp4train.quantize import quantizer

FEATURES = 256
SAMPLE = Layer(name="sample", in_features=FEATURES, out_features=FEATURES, block=0, blocks=1)
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
        native_on: GPUs that run all its GEMMs on their own kernels.
        problem: sentence about what is wrong, or None.
    """

    name: str
    runs: str = "-"
    why: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    codes: bool | None = None
    native_on: tuple[str, ...] = ()
    problem: str | None = None


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
    # of a driver, a compiler, a missing library: to be reported, whatever it is
    except Exception as error:
        outcome.problem = named(error)
    return outcome


def _native(recipe: Recipe, device: Device) -> bool:
    plan = resolve(SAMPLE, recipe, None, "auto", device)
    return all(gemm.backend != "emulate" for gemm in plan.gemms)
