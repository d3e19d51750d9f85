"""Compile fp4train's Triton kernels for GPUs that are not there: Triton brings its own ptxas."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from gpu_compile import Driver
from pretended import Machine
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from fp4train.quantize import Launch

CUOBJDUMP = triton.knobs.nvidia.cuobjdump.path
"""It comes with Triton, as ptxas does."""
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Noted:
    """One launch: its kernel, and all arguments but the compile-time ones."""

    launch: Launch
    arguments: tuple[Any, ...]


@contextmanager
def recorded() -> Iterator[list[Noted]]:
    """Launches are noted instead of run, and CPU tensors pass for CUDA ones."""
    launches: list[Noted] = []

    def note(self: Launch, *pointers: torch.Tensor, words: tuple[Any, ...] = ()) -> None:
        launches.append(Noted(self, (*self.seen(pointers), *self.sizes, *words)))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Launch, "__call__", note)
        Machine(monkeypatch).interprets_triton(False)
        yield launches


def launches_of(call: Callable[[], object]) -> list[Noted]:
    with recorded() as launches:
        call()
    return launches


def compile_launch(noted: Noted, capability: int) -> Any:
    """The compiled kernel (`.asm["ptx"]`, `.asm["cubin"]`), specialised as a launch with these
    arguments would be.
    """
    kernel = noted.launch.kernel
    launch = noted.launch
    signature: dict[str, Any] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    for index, (parameter, value) in enumerate(zip(kernel.params, noted.arguments, strict=False)):
        if isinstance(value, tuple):
            signature[parameter.name] = tuple(POINTERS[each.dtype] for each in value)
            attributes |= {(index, at): [["tt.divisibility", 16]] for at in range(len(value))}
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in launch.constants}
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature=ordered, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    with patch.object(driver, "_active", Driver(capability)):
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What a kernel takes of a multiprocessor, by name: REG registers a thread; spilled ones lie in
    its STACK.
    """
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    found = subprocess.run(
        [CUOBJDUMP, "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", found)}
