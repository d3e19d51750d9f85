"""A process that computes as one with a GPU: Triton's interpreter quantises, and `scaled_mm` is
recorded and computed (recorded_products.py). TRITON_INTERPRET must be set before Triton is
imported.

Both are operators of torch here, which `recorder_on_cpu` sees and repeats as a CUDA graph does
kernels.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import interpreted
import torch
from recorded_products import Recorder
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import fp4train.train as loop
from fp4train.backends import native
from fp4train.nn import operands, scaling, weight_form, weights
from fp4train.quantize import quantizer, sharded, triton_launch

launched: Counter[str] = Counter()
"""Launches so far, by kernel."""

LIBRARY = torch.library.Library("fp4train_tests", "DEF")
WORK: list[Callable[..., Any]] = []
"""What the operators do, of each call."""
WRITES: dict[tuple[str, str], tuple[int, ...]] = {}
"""The places of the pointers that a kernel writes to, by its name and constants."""


def install() -> None:
    """From here on, in this process."""
    interpreted.hasten(checks_overflow=False)
    triton_launch.Launch.__call__ = launched_as_operator(triton_launch.Launch.__call__)  # type: ignore[method-assign]
    native.why_not_blocks, native.F.scaled_mm = lambda *_: None, multiplied_as_operator(Recorder())  # type: ignore[assignment]
    quantise_by("triton")


def quantise_by(kernel: str, *modules: Any) -> None:
    """Layers, or those of their modules that are named, quantise by this kernel, of which all have
    the same bits.
    """
    for module in modules or (operands, scaling, sharded, weight_form, weights):
        module.quantizer = lambda spec, device: quantizer(spec, device, kernel)


def tell(path: str) -> None:
    """Write the launches of all steps so far to a file, after each."""
    step = loop.train_step

    def told(*arguments: Any) -> Any:
        made = step(*arguments)
        Path(path).write_text(json.dumps(launched))
        return made

    loop.train_step = told


LIBRARY.define("launch(Tensor(a!)[] written, Tensor[] read, int work) -> ()")
LIBRARY.define("product(Tensor[] read, int work) -> Tensor")
LIBRARY.impl("launch", lambda written, read, work: WORK[work](written, read), "CPU")
LIBRARY.impl("product", lambda read, work: WORK[work](read), "CPU")


def launched_as_operator(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`Launch.__call__`, whose pointers and words on the device an operator is given."""

    def call(self: Any, *pointers: Tensor, words: tuple[Any, ...] = ()) -> None:
        launched[self.kernel.fn.__name__] += 1
        written = written_by(launch, self, pointers, words)
        on_device = [at for at, word in enumerate(words) if isinstance(word, Tensor)]

        def work(into: list[Tensor], read: list[Tensor]) -> None:
            left = iter(into)
            other = iter(read)
            own = list(words)
            given = [next(left if at in written else other) for at in range(len(pointers))]
            for at in on_device:
                own[at] = next(other)
            launch(self, *given, words=tuple(own))

        WORK.append(work)
        read = [each for at, each in enumerate(pointers) if at not in written] + [
            words[at] for at in on_device
        ]
        torch.ops.fp4train_tests.launch([pointers[at] for at in written], read, len(WORK) - 1)

    return call


def written_by(
    launch: Callable[..., Any], self: Any, pointers: tuple[Tensor, ...], words: Any
) -> tuple[int, ...]:
    """The places of the pointers to which the kernel writes: a first launch, on copies, says where
    it does.
    """
    key = self.kernel.fn.__name__, repr(self.constants)
    if key in WRITES:
        return WRITES[key]
    stored: list[tuple[int, int]] = []

    def noting(real: Callable[..., Any], place: int, mask: int) -> Callable[..., Any]:
        def note(builder: Any, *given: Any) -> Any:
            if given[mask].data.any():
                addresses = given[place].data[given[mask].data]
                stored.append((int(addresses.min()), int(addresses.max())))
            return real(builder, *given)

        return note

    with torch.utils._python_dispatch._disable_current_modes():
        copies = [copied(each) for each in pointers]
        store = noting(InterpreterBuilder.create_masked_store, 0, 2)
        join = noting(InterpreterBuilder.create_atomic_rmw, 1, 3)
        with (
            patch.object(InterpreterBuilder, "create_masked_store", store),
            patch.object(InterpreterBuilder, "create_atomic_rmw", join),
        ):
            launch(self, *copies, words=words)
    ranges = [
        (each.data_ptr(), each.data_ptr() + each.untyped_storage().nbytes()) for each in copies
    ]
    WRITES[key] = tuple(
        place
        for place, (begin, end) in enumerate(ranges)
        if any(begin <= first and last < end for first, last in stored)
    )
    return WRITES[key]


def copied(x: Tensor) -> Tensor:
    """x in a copy of all the memory that it is a part of."""
    empty = torch.empty(0, dtype=x.dtype)
    return empty.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def multiplied_as_operator(multiply: Recorder) -> Callable[..., Tensor]:
    """`scaled_mm`, whose codes and scales an operator is given."""

    def call(
        a: Tensor, b: Tensor, scale_a: Any, scaling_a: Any, scale_b: Any, *rest: Any, **options: Any
    ) -> Tensor:
        scales = len(scale_a)

        def work(read: list[Tensor]) -> Tensor:
            a, b, *others = read
            return multiply(a, b, others[:scales], scaling_a, others[scales:], *rest, **options)

        WORK.append(work)
        made: Tensor = torch.ops.fp4train_tests.product([a, b, *scale_a, *scale_b], len(WORK) - 1)
        return made

    return call
