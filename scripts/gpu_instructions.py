"""SASS instructions per element of the kernels that quantise, compiled for GPUs that are not there:

    python scripts/gpu_instructions.py --out FILE.json [--sm 89 90 100 120]

The kernels are those that `gpu_bandwidth.py` times, at its size. Triton's wheel brings the assembler and the
disassembler. No kernel has a loop: a thread executes each instruction once, so those of a thread over its elements of x
are those per element. `amax_tensor`, which has one, is left out.

    instructions    per element of x, without NOP
    registers       of a thread
    spilled         bytes of registers that lie in memory

Kernels that are counted under another Triton may differ: FILE names its version. Exit code 1: a kernel spills.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_bandwidth
import gpu_compile
import torch
import triton
from gpu_cases import SPECS
from gpu_recorded import Launches, Uncomputed, as_on_a_gpu, record_of
from torch import Tensor
from triton.runtime.driver import driver

from fp4train.quantize import triton as kernels
from fp4train.quantize.launch import Launch

LOOPS = ("amax_tensor",)
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE
)
WARP = 32


@dataclass(frozen=True)
class Counted:
    """A kernel by its launch.

    elements: of x, of a thread.
    """

    name: str
    record: dict[str, Any]
    elements: float


class Kernels(Launches):
    """The kernels of calls, each once."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.call = ""
        self.counted: dict[str, Counted] = {}

    def note(self, launch: Launch, *pointers: Tensor, words: tuple[Any, ...] = ()) -> None:
        record = record_of(launch, pointers, words)
        if record["kernel"] in LOOPS:
            return
        elements = self.elements / (launch.programs * launch.warps * WARP)
        name = f"{self.call}: {record['kernel']}"
        self.counted[json.dumps(record, sort_keys=True)] = Counted(name, record, elements)


def timed_kernels(processors: int = 132) -> list[Counted]:
    """The kernels that `gpu_bandwidth.py` times, and those that decode."""
    size = gpu_bandwidth.SIZE
    noted = Kernels(size * size)
    with as_on_a_gpu(noted, processors), Uncomputed():
        x = torch.empty(size, size, dtype=torch.bfloat16)
        for kernel in gpu_bandwidth.KERNELS:
            noted.call = kernel.name
            kernel.call(x)()
        for name in ("nvfp4", "mxfp8 e4m3"):
            quantizer = kernels.TritonQuantizer(SPECS[name])
            noted.call = f"values from codes of {name}"
            codes = quantizer.codes(x)
            quantizer.decode(codes)
    return list(noted.counted.values())


def instructions(cubin: Path) -> int:
    """Those of a thread."""
    text = printed(triton.knobs.nvidia.nvdisasm.path, "-c", cubin)
    return sum(name != "NOP" for name in INSTRUCTION.findall(text))


def printed(program: str, option: str, cubin: Path) -> str:
    """What a program of NVIDIA's says of a compiled kernel."""
    command = [program, option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rows(capability: int) -> list[dict[str, Any]]:
    """A row per kernel, compiled for a compute capability (times ten).

    Triton's JIT keeps what it compiled, whatever the GPU: a process counts for one.
    """
    driver.set_active(gpu_compile.Driver(capability))
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = str(Path(folder, "cache"))
        return [row(kernel, capability, Path(folder, "cubin")) for kernel in timed_kernels()]


def row(kernel: Counted, capability: int, cubin: Path) -> dict[str, Any]:
    compiled = gpu_compile.compiled_kernel(kernel.record)
    assert compiled.metadata.target.arch == capability
    cubin.write_bytes(compiled.asm["cubin"])
    used = printed(triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
    resources = {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", used)}
    return {
        "kernel": kernel.name,
        "sm": capability,
        "instructions": round(instructions(cubin) / kernel.elements, 1),
        "registers": resources["REG"],
        "spilled": resources["STACK"] + resources["LOCAL"],
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sm", type=int, nargs="+", default=[89, 90, 100, 120])
    options = parser.parse_args(words)
    found: list[dict[str, Any]] = []
    spawned = multiprocessing.get_context("spawn")
    for capability in options.sm:
        with ProcessPoolExecutor(1, mp_context=spawned) as process:
            for counted in process.submit(rows, capability).result():
                print(json.dumps(counted), flush=True)
                found.append(counted)
    results = {"triton": triton.__version__, "rows": found}
    options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return int(any(row["spilled"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
