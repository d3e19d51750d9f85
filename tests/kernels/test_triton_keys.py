"""The kernel that a launch runs is the one that Triton would compile for its arguments, whatever
was launched before: plans and compiled kernels are kept by all that decides them.

Each case is called with arguments that differ in one respect (dtype, alignment, strides, shape, an
argument that is not given), first each with nothing kept, then one after the other with everything
kept. No GPU is needed: a JIT that compiles nothing says by Triton's own key which kernel it would
compile: the types of the arguments, what it specialises them for (multiples of 16, ones,
alignment), constants and options.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
from lengths import long_but
from pretended import Machine
from torch import Tensor

from fp4train.backends import scaled
from fp4train.optim import rounded
from fp4train.precision import MXFP8, NVFP4, FP8Current
from fp4train.quantize import (
    Decoded,
    Delayed,
    Launch,
    QuantSpec,
    RandomKey,
    TritonQuantizer,
    quantize,
)

triton = pytest.importorskip(
    "triton", reason="triton is not installed (Linux only: pip install triton)"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True
    )

FP8 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)
PER_ROW = replace(FP8, block=(1, None))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEY = RandomKey(seed=1, step=2, layer=3, operand=0)


@dataclass(frozen=True)
class Ran:
    """One launch of a compiled kernel."""

    kernel: str
    grid: tuple[int, ...]
    key: str
    """Of the arguments that it was compiled for."""
    numbers: tuple[object, ...]
    """Arguments that are no tensors."""


class Compiled:
    """Stands in for Triton's CompiledKernel: notes its launches."""

    def __init__(self, kernel: JITFunction[Any], key: str, ran: list[Ran]) -> None:
        self.kernel = kernel
        self.key = key
        self.ran = ran

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object) -> None:
            numbers = [x for x in arguments if not isinstance(x, torch.Tensor | tuple)]
            self.ran.append(Ran(self.kernel.__name__, grid, self.key, tuple(map(repr, numbers))))

        return launch


@cache
def _binder(kernel: JITFunction[Any]) -> Any:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def key_of(kernel: JITFunction[Any], *arguments: object, **options: object) -> str:
    """Triton's key of the kernel that a launch with these arguments needs."""
    _, specialization, left = _binder(kernel)(*arguments, **options)
    return f"{specialization} {sorted(left.items())}"


@contextmanager
def without_compiler() -> Iterator[list[Ran]]:
    """CPU tensors pass for CUDA ones, and kernels are launched into a list; a launch of another
    kernel than the JIT would launch with its arguments is an AssertionError.
    """
    ran: list[Ran] = []
    launch = Launch.__call__

    def run(
        self: JITFunction[Any], *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any
    ) -> Any:
        compiled = Compiled(self, key_of(self, *arguments, **options), ran)
        compiled[(*grid, 1, 1)](
            *arguments, *[options[p.name] for p in self.params if p.name in options]
        )
        return compiled

    def checked(self: Launch, *pointers: torch.Tensor, words: tuple[Any, ...] = ()) -> None:
        try:
            seen = self.seen(pointers)
        except RuntimeError as error:
            refused = error
            with mock.patch.object(JITFunction, "run", side_effect=refused):
                launch(self, *pointers, words=words)
            raise AssertionError(
                f"{self.kernel} was launched with what it is not compiled for"
            ) from refused
        launch(self, *pointers, words=words)
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        wanted = key_of(self.kernel, *seen, *self.sizes, *words, **self.constants, **options)  # type: ignore[arg-type]
        assert ran[-1].key == wanted, (
            f"{ran[-1].kernel}: compiled for {ran[-1].key}, launched with {wanted}"
        )

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(Launch, "__call__", checked),
        pytest.MonkeyPatch.context() as patch,
    ):
        Machine(patch).interprets_triton(False)
        forget_plans()
        yield ran
        forget_plans()


def forget_plans() -> None:
    """Empty all caches of the package's functions, those of its plans among them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fp4train."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A call that launches kernels: the objects that keep plans, its tensors, and what it calls
    with both.
    """

    new: Callable[[], Any]
    tensors: dict[str, Tensor]
    call: Callable[..., object]


def one_form(spec: QuantSpec, method: str, **tensors: Tensor) -> Case:
    """Codes or values by a spec; `counters` enters the key of the random bits."""

    def call(
        quantizer: TritonQuantizer,
        x: Tensor,
        amax: Tensor | None = None,
        counters: Tensor | None = None,
    ) -> Any:
        key = (
            RandomKey(seed=1, step=2, layer=3, operand=0, counters=counters)
            if spec.random
            else None
        )
        return getattr(quantizer, method)(x, key, amax)

    return Case(lambda: TritonQuantizer(spec), tensors or {"x": bf16(64, 96)}, call)


def amax(spec: QuantSpec, per_row: bool) -> Case:
    def call(quantizer: TritonQuantizer, x: Tensor, into: Tensor | None = None) -> Tensor:
        return quantizer.amax(x, per_row=per_row, into=into)

    into = {} if per_row else {"into": ONE}
    return Case(lambda: TritonQuantizer(spec), {"x": bf16(64, 96), **into}, call)


def decoded(spec: QuantSpec) -> Case:
    def call(quantizer: TritonQuantizer, x: Tensor) -> object:
        return quantizer.decode(quantize(x, spec, kernel="reference"))

    return Case(lambda: TritonQuantizer(spec), {"x": bf16(64, 96)}, call)


Pair = tuple[TritonQuantizer, TritonQuantizer]


def pair(row: QuantSpec, column: QuantSpec) -> Callable[[], Pair]:
    return lambda: (TritonQuantizer(row).in_tiles, TritonQuantizer(column).in_tiles)


def both(
    row: QuantSpec, column: QuantSpec, codes: tuple[bool, bool] = (True, True), **tensors: Tensor
) -> Case:
    def call(
        made: Pair,
        x: Tensor,
        amax: Tensor | None = None,
        newest: Tensor | None = None,
        counters: Tensor | None = None,
    ) -> object:
        key = KEY
        if counters is not None:
            key = RandomKey(seed=1, step=2, layer=3, operand=0, counters=counters)
        keys = (key if row.random else None, key if column.random else None)
        by_rows, by_columns = made
        return by_rows.with_columns(by_columns, x, keys, (amax, amax), codes, newest)

    return Case(pair(row, column), {"x": bf16(64, 96), **tensors}, call)


def adamw() -> Case:
    def call(_: None, weight: Tensor, found_inf: Tensor, counters: Tensor) -> None:
        moments = (
            torch.zeros_like(weight, dtype=torch.bfloat16),
            torch.zeros_like(weight, dtype=torch.bfloat16),
        )
        group = {"betas": (0.9, 0.95), "lr": 1e-3, "weight_decay": 0.1}
        numbers = rounded.numbers_of(torch.ones(1), group, None, found_inf)
        key = RandomKey(seed=1, step=2, layer=3, operand=0, counters=counters)
        decays = rounded.Decays(beta1=0.9, rest1=0.1, beta2=0.95, rest2=0.05, eps=1e-8)
        tensors = rounded.SlabTensors(weight, torch.zeros_like(weight), *moments)
        rounded.by_triton(tensors, rounded.Keys(key, key, 0), numbers, 0, decays)

    return Case(
        lambda: None, {"weight": torch.zeros(64, 96), "found_inf": ONE, "counters": COUNTERS}, call
    )


def product(adds: bool, library: bool, **tensors: Tensor) -> Case:
    """A product whose scales are applied in it; library: what it leaves to do after a product of
    cuBLAS.
    """

    class Products(scaled.ScaledProducts):
        def _cublas_on(self, device: torch.device) -> Any:
            return SimpleNamespace(multiply=lambda *_: None) if library else None

    def call(
        products: Products,
        x: Tensor,
        y: Tensor,
        first: Tensor | None = None,
        second: Tensor | None = None,
    ) -> None:
        a = Decoded(x, first)
        b = Decoded(y, second)
        with pytest.MonkeyPatch.context() as pretended:
            Machine(pretended).multiplies_by_triton()
            if reason := scaled.why_not(
                a, b, torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
            ):
                raise ValueError(reason)
        with patch.object(scaled.cublas, "takes", lambda tensor: True):
            if adds:
                products.add(torch.zeros(len(x), len(y)), a, b)
            else:
                products.product(a, b, out_dtype=x.dtype)

    return Case(Products, {"x": bf16(64, 96), "y": bf16(64, 96), "first": ONE, **tensors}, call)


ONE = torch.zeros(())
COUNTERS = torch.zeros(8, dtype=torch.int32)
RECIPES = {"nvfp4": NVFP4().table(), "mxfp8": MXFP8().table(), "fp8": FP8Current().table()}
X = {name: (table["fprop"].first, table["wgrad"].second) for name, table in RECIPES.items()}
DY = {name: (table["dgrad"].first, table["wgrad"].first) for name, table in RECIPES.items()}
DELAYED = replace(FP8, delayed=Delayed())

CASES: dict[str, Case] = {
    "nvfp4 codes": one_form(QuantSpec(), "codes", x=bf16(64, 96), amax=ONE),
    "wgrad codes": one_form(DY["nvfp4"][1], "codes", x=bf16(64, 96), amax=ONE, counters=COUNTERS),
    "a global scale per tile": one_form(QuantSpec(global_scale=(128, 128)), "codes"),
    "amax": amax(QuantSpec(), False),
    "amax of rows": amax(PER_ROW, True),
    "amax after the transform": amax(X["nvfp4"][1], False),
    "nvfp4 codes decoded": decoded(QuantSpec()),
    "both forms, nvfp4": both(*DY["nvfp4"], counters=COUNTERS),
    "both forms, mxfp8": both(*X["mxfp8"]),
    "both forms, fp8": both(FP8, FP8, amax=ONE),
    "both forms, fp8 delayed": both(DELAYED, DELAYED, amax=ONE, newest=torch.zeros(())),
    "a step of adamw": adamw(),
    "product, scales of rows": product(False, False, second=torch.zeros(64, 1)),
    "product, added after cuBLAS": product(True, True),
}


def variants(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors, and the same with one of them, or all matrices, in another dtype, place, layout
    or shape.
    """
    yield "as they are", tensors
    for name, tensor in tensors.items():
        for dtype in (torch.int64,) if tensor.dtype == torch.int32 else DTYPES:
            if dtype != tensor.dtype:
                yield f"{name} in {dtype}", tensors | {name: tensor.to(dtype)}
        for shift in (1, 4):
            yield f"{name} begins {shift} elements later", tensors | {name: later(tensor, shift)}
        without = {other: value for other, value in tensors.items() if other != name}
        yield f"without {name}", without
    for what, change in LAYOUTS.items():
        yield (
            f"all {what}",
            {name: change(tensor) if tensor.dim() else tensor for name, tensor in tensors.items()},
        )


def later(tensor: Tensor, shift: int) -> Tensor:
    return torch.zeros(tensor.numel() + shift, dtype=tensor.dtype)[shift:].view(tensor.shape)


def sized(*shape: int) -> Callable[[Tensor], Tensor]:
    """A tensor of as many dimensions; vectors have the columns, but for those of a row's number of
    them.
    """
    rows, cols = shape

    def change(tensor: Tensor) -> Tensor:
        sizes = {64: rows, 96: cols}
        return torch.zeros([sizes.get(size, size) for size in tensor.shape], dtype=tensor.dtype)

    return change


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of one row": sized(1, 96),
    "of other rows": sized(7, 96),
    "of one column": sized(64, 1),
    "of other columns": sized(64, 103),
    "of wider rows": lambda x: torch.zeros(64, 112, dtype=x.dtype)[:, :96] if x.dim() == 2 else x,
    "of rows of an odd width": lambda x: (
        torch.zeros(64, 113, dtype=x.dtype)[:, :96] if x.dim() == 2 else x
    ),
    "transposed": lambda x: torch.zeros(96, 64, dtype=x.dtype).T if x.dim() == 2 else x,
    "of every second column": lambda x: (
        torch.zeros(64, 192, dtype=x.dtype)[:, ::2] if x.dim() == 2 else x
    ),
}


def outcome(case: Case, kept: Any, tensors: dict[str, Tensor], ran: list[Ran]) -> list[Ran] | str:
    """The launches of a call, or the name of its error."""
    ran.clear()
    try:
        case.call(kept, **tensors)
    except AssertionError as error:
        if "launched with" in str(error):
            raise
        return "AssertionError"
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return type(error).__name__
    return list(ran)


@pytest.mark.parametrize(
    "name",
    long_but(
        (
            "nvfp4 codes",
            "amax of rows",
            "both forms, nvfp4",
            "both forms, fp8 delayed",
            "a step of adamw",
            "product, added after cuBLAS",
        ),
        CASES,
    ),
)
def test_what_was_launched_before_changes_no_launch(name: str) -> None:
    """Neither its kernel, its grid, nor a number that it is given."""
    case = CASES[name]
    changed = dict(variants(case.tensors))
    with without_compiler() as ran:
        fresh = {}
        for what, tensors in changed.items():
            forget_plans()
            fresh[what] = outcome(case, case.new(), tensors, ran)
        launches = [found for found in fresh.values() if found and not isinstance(found, str)]
        assert len({str(found) for found in launches}) > 1, "no argument matters"
        forget_plans()
        kept = case.new()
        for what in (*changed, *reversed(changed)):
            assert outcome(case, kept, changed[what], ran) == fresh[what], what


NUMBERS = [
    (name, number)
    for name, case in CASES.items()
    for number in ("amax", "into", "newest", "found_inf", "counters", "first")
    if number in case.tensors and case.tensors[number].numel() in (1, 8)
]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_no_kernel_is_compiled_twice_for_where_one_number_lies(name: str, number: str) -> None:
    """An amax of a history, an amax that is filled, a counter of the step: views of 4 bytes at any
    place.
    """
    case = CASES[name]
    shifted = case.tensors | {number: later(case.tensors[number], 1)}
    with without_compiler() as ran:
        usual = outcome(case, case.new(), case.tensors, ran)
        assert usual and usual == outcome(case, case.new(), shifted, ran)
