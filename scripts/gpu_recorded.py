"""The launches of fp4train's Triton kernels that the part `nine` of `gpu_check.py` makes, recorded without a GPU:

    python scripts/gpu_recorded.py LAUNCHES.json [--processors 132]

Its cases are called (`gpu_cases`, `gpu_bandwidth`), and steps of llama_1b with one block in its recipes
and modes, at their sizes: a launch depends on sizes, and not on the number of blocks. Nothing is computed: an operator
of torch that would fill large memory leaves it as it is, and products multiply nothing. Kernels of other
packages (liger's, torch.compile's) are not recorded.

A launch is what Triton's JIT decides by: kernel, dtypes, alignment, numbers, constants and warps. `gpu_compile.py`
compiles them.

`--processors`: multiprocessors of the GPU, 132 of an H100 and an H200, 148 of a B200.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpu_bandwidth
import gpu_copy
import gpu_kernels
import gpu_profile
import torch
from benchmark_steps import built_run, real_vocabulary
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fp4train.backends import native, scaled
from fp4train.backends.emulate import SCALED, Emulate
from fp4train.models.common import initialise, on_cpu
from fp4train.nn import engine
from fp4train.quantize import Decoded, Quantized, QuantSpec, cpu, triton, triton_launch
from fp4train.quantize.launch import Launch
from fp4train.quantize.quantizer import quantizer
from fp4train.train import enter_stretch, train_step

Operand = Decoded | Quantized
SMALL = 1 << 16
"""Elements of tensors that are computed: numbers, scales and counters, which decide what is
launched.
"""


UNAUDITED = ("audit.every=0", "audit.sums=0")
"""Runs on a GPU compare no layers."""


class Uncomputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators whose results are large give memory that nobody filled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        sizes: list[int] = []
        tree_map_only(Tensor, lambda tensor: sizes.append(tensor.numel()), (args, kwargs))
        returns = function._schema.returns
        views = any(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        )
        scalars = not all("Tensor" in str(value.type) for value in returns)
        small = max(sizes, default=0) < SMALL and not _makes_much(args, kwargs)
        # numbers decide the shape of the result
        by_numbers = torch.Tag.dynamic_output_shape in function.tags
        if views or scalars or small or by_numbers:
            return function(*args, **kwargs)
        if any(value.alias_info is not None for value in returns):
            return args[0]
        if function._schema.is_mutable:
            return function(*args, **kwargs) if returns else None
        arguments, options = tree_map_only(Tensor, _meta, (args, kwargs))
        if "device" in options:
            options = options | {"device": "meta"}
        return tree_map_only(Tensor, _memory, function(*arguments, **options))


def _makes_much(args: Any, kwargs: Any) -> bool:
    """Whether an operator that takes no tensor makes a large one, by a size among its arguments."""
    sizes = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    numbers = [
        value for value in sizes if value and all(isinstance(number, int) for number in value)
    ]
    product = 1
    for number in numbers[0] if numbers else ():
        product *= number
    return product >= SMALL


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class Launches:
    """Launches as JSON, each once."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}

    def note(self, launch: Launch, *pointers: Tensor, words: tuple[Any, ...] = ()) -> None:
        """In the place of `Launch.__call__`."""
        self.texts[json.dumps(record_of(launch, pointers, words), sort_keys=True)] = None

    def multiplied(self) -> None:
        """A library's product."""


def record_of(launch: Launch, pointers: Sequence[Tensor], words: tuple[Any, ...]) -> dict[str, Any]:
    """A launch as `gpu_compile.py` reads it."""
    kernel: Any = launch.kernel
    record = {
        "module": kernel.fn.__module__,
        "kernel": kernel.fn.__name__,
        "arguments": [
            described(value) for value in (*launch.seen(pointers), *launch.sizes, *words)
        ],
        "constants": {name: constant(value) for name, value in launch.constants.items()},
        "warps": launch.warps,
    }
    for parameter, value in zip(kernel.params, record["arguments"], strict=False):
        if parameter.do_not_specialize and isinstance(value, int):
            record["arguments"][parameter.num] = 0
    return record


def described(value: Any) -> Any:
    """An argument as `gpu_compile.py` reads it."""
    if isinstance(value, tuple | list):
        return [described(part) for part in value]
    if isinstance(value, Tensor):
        # Of memory that torch's allocator gives on a GPU, which begins at multiples of 512 bytes.
        offset = value.storage_offset() * value.element_size()
        return {"dtype": str(value.dtype).removeprefix("torch."), "aligned": offset % 16 == 0}
    return value


def constant(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"fields": dataclasses.asdict(value), "text": repr(value)}
    return value


@contextmanager
def as_on_a_gpu(launches: Launches, processors: int) -> Iterator[None]:
    """Launches are noted; what asks whether Triton runs on a device is told that it does, and
    products give memory.
    """

    def product(a: Tensor, b: Tensor, *_: Any, **options: Any) -> Tensor:
        launches.multiplied()
        dtype = options.get("out_dtype") or options.get("output_dtype")
        return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)

    def multiply(*_: object) -> None:
        launches.multiplied()

    def asked(products: scaled.ScaledProducts, device: torch.device) -> SimpleNamespace | None:
        return None if products._way == "triton" else SimpleNamespace(multiply=multiply)

    def emulated(_: Emulate, a: Operand, b: Operand, **options: Any) -> Tensor:
        return emulated_product(launches, a, b, **options)

    forget_plans()
    with ExitStack() as stack:
        for place, name, instead in (
            (cpu, "why_not", lambda spec, device: triton.why_not_spec(spec)),
            (cpu, "make", triton.make),
            (on_cpu, "why_not", lambda *_: "a GPU's kernels are recorded"),
            (triton, "why_not_here", lambda device: None),
            (triton_launch, "interpreted", lambda: False),
            (triton_launch, "processors", lambda device: processors),
            (
                Launch,
                "__call__",
                lambda launch, *pointers, words=(): launches.note(launch, *pointers, words=words),
            ),
            (native, "why_not_blocks", lambda *_: None),
            (torch.nn.functional, "scaled_mm", product),
            (torch, "_scaled_mm", product),
            (Emulate, "product", emulated),
            (
                Emulate,
                "_in_product",
                lambda self, total, a, b: scaled.why_not(a, b, total.dtype) is None,
            ),
            (engine, "ADDING", frozenset({"cpu"})),
            (scaled, "why_not_here", lambda device: None),
            (scaled, "processors", lambda device: processors),
            (scaled.ScaledProducts, "_cublas_on", asked),
            (initialise, "fill_normal", lambda *_: None),
        ):
            stack.enter_context(patch.object(place, name, instead))
        yield
    forget_plans()


def forget_plans() -> None:
    """Plans, and kernels that were chosen, depend on what stands in for the GPU."""
    quantizer.cache_clear()
    scaled._plan_product.cache_clear()
    scaled._plan_factors.cache_clear()
    scaled._plan_two_factors.cache_clear()
    scaled._plan_corrections.cache_clear()


def decoded(operand: Operand) -> Decoded:
    if isinstance(operand, Quantized):
        return quantizer(operand.spec, "cpu").decode(operand)
    return operand


def emulated_product(
    launches: Launches,
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Launch what `Emulate.product` launches on a GPU."""
    x = decoded(a)
    y = decoded(b)
    if scaled.why_not(x, y, out_dtype) is None:
        if bias is not None:
            bias = bias.to(out_dtype)
        return SCALED.product(x, y, out_dtype=out_dtype, bias=bias)
    launches.multiplied()
    return x.values.new_empty((len(x.values), len(y.values)), dtype=out_dtype)


def training_steps(
    words: list[str],
    layers: int = 1,
    mode: Callable[[], TorchDispatchMode] = Uncomputed,
    at_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Two steps of a run whose model has so many blocks; `at_step` sees which begins."""
    with real_vocabulary(seq_len=2048) as data:
        keys = [*words, *data, f"model.layers={layers}", "policy=all", *UNAUDITED]
        with mode(), built_run(torch.device("cpu"), keys) as (run, _):
            enter_stretch(run, None)
            for _ in range(2):
                at_step(run.step)
                train_step(run, run.course.plan.at(run.step).recipe)
                run.step += 1
                run.mid_update = False


def cases() -> None:
    """The kernels of all cases that are compared with the reference."""
    equal = patch.object(gpu_kernels, "difference", lambda *_: None)
    with equal, patch.object(triton, "why_not", lambda *_: None):
        for choice in ("first", "launched", "pieces"):
            for case in gpu_kernels.CHOICES[choice](gpu_kernels.SHAPES):
                gpu_kernels.check(case, "cpu")


def bandwidth() -> None:
    """The kernels that are timed, and products of integers before them."""
    with Uncomputed():
        x = torch.empty(gpu_bandwidth.SIZE, gpu_bandwidth.SIZE, dtype=torch.bfloat16)
        triton.TritonQuantizer(QuantSpec()).amax(x)
        gpu_copy.by_triton(x, torch.empty_like(x))
        for kernel in gpu_bandwidth.KERNELS:
            kernel.call(x)()
        square = x[: gpu_bandwidth.LARGEST_PRODUCT, : gpu_bandwidth.LARGEST_PRODUCT].contiguous()
        for way in ("cublas", "triton"):
            products = scaled.ScaledProducts(way)
            gpu_bandwidth.multiplied(products, square)
            for sizes, kind in itertools.product(
                gpu_bandwidth.INTEGER_SIZES, gpu_bandwidth.INTEGERS
            ):
                gpu_bandwidth.integer_product(products, kind, sizes, torch.device("cpu"))


def sources(capability: int) -> dict[str, Callable[[], None]]:
    """What is recorded, by name."""
    calls: dict[str, Callable[[], None]] = {"cases": cases, "bandwidth": bandwidth}

    def backend(recipe: str) -> list[str]:
        if recipe == "bf16":
            return []
        on_blackwell = capability >= 100 and recipe in ("nvfp4", "mxfp8")
        if recipe.startswith("fp8") or on_blackwell:
            return ["backend=native"]
        return ["backend=emulate"]

    for recipe, mode, count in gpu_profile.NINE:
        if mode in ("emulated", "eager") or (mode == "native" and capability >= 100):
            words = gpu_profile.key_words(recipe, mode, count)
            if mode == "eager":
                words += backend(recipe)
            calls[f"llama_1b, {recipe}, {mode}"] = partial(training_steps, words)
    return calls


def recorded(capability: int, processors: int) -> list[dict[str, Any]]:
    """The launches of `nine` on a GPU of a compute capability, each once."""
    launches = Launches()
    with as_on_a_gpu(launches, processors):
        for name, call in sources(capability).items():
            count = len(launches.texts)
            call()
            print(f"{name}: {len(launches.texts) - count} launches", flush=True)
    return [json.loads(text) for text in launches.texts]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--sm", type=int, default=90, help="compute capability times ten")
    parser.add_argument("--processors", type=int, default=132)
    options = parser.parse_args(words)
    launches = recorded(options.sm, options.processors)
    options.out.write_text(json.dumps(launches), "utf-8")
    print(f"{len(launches)} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
