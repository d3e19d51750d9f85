"""Which kernels launches run, without a GPU: Triton's own key of a kernel, and a JIT that compiles
nothing.

A key is what Triton decides by whether a kernel is compiled again: the types of the arguments, what
it specialises them for (multiples of 16, ones, alignment), constants and options.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from pretended import Machine
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from fp4train.quantize import Launch


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
