"""Instructions per element of the CPU kernels that make the forms of an NVFP4 layer, counted by single steps:

    python scripts/cpu_instructions.py

Each form of x and dy is made of 256 and of 512 tokens of 256 features, one thread; the difference is that of their
elements. A trap after each instruction counts it (x86-64, Linux), which needs no counters of the processor; runs differ
by about 1 %. "a layer" is x's and dy's forms and the decoding of x's codes; with `train.keep_values=true`, values take
the place of codes.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import signal
from collections.abc import Callable

import torch

from fp4train.kernels.cpu import Machine
from fp4train.precision import NVFP4
from fp4train.quantize import PairQuantizer, RandomKey
from fp4train.quantize.cpu import CpuQuantizer

TOKENS, FEATURES = 256, 256
KEY = RandomKey(seed=1, step=2, layer=3, operand=2)
HANDLER, START, STOP = 8, 16, 26
CODE = bytes.fromhex("48ff05f1ffffffc39c810c24000100009dc39c812424fffeffff9dc3")
"""inc [counter], which lies 8 bytes before it; set, and clear, the trap flag."""


def counter() -> Callable[[Callable[[], object]], int]:
    """What counts the instructions of a call."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page[HANDLER : HANDLER + len(CODE)] = CODE
    count = ctypes.c_uint64.from_buffer(page)
    address = ctypes.addressof(count)
    start, stop = (ctypes.PYFUNCTYPE(None)(address + at) for at in (START, STOP))
    ctypes.CDLL(None).signal(signal.SIGTRAP, ctypes.c_void_p(address + HANDLER))

    def instructions(call: Callable[[], object]) -> int:
        call()
        count.value = 0
        start()
        call()
        stop()
        return count.value

    return instructions


def forms(machine: Machine, tokens: int) -> dict[str, Callable[[], object]]:
    """What makes the forms of x and dy."""
    table = NVFP4().table()
    x = torch.randn(tokens, FEATURES).bfloat16()
    specs = table["fprop"].first, table["wgrad"].second, table["dgrad"].first, table["wgrad"].first
    x_row, x_column, dy_row, dy_column = (CpuQuantizer(spec, machine) for spec in specs if spec)
    of_x, kept = (
        PairQuantizer(x_row, x_column, row_codes=False, column_codes=codes)
        for codes in (True, False)
    )
    of_dy = PairQuantizer(dy_row, dy_column, row_codes=False, column_codes=False)
    codes = x_column.codes(x.T)
    return {
        "x: values, and codes of x.T": lambda: of_x(x, None, None, None, None),
        "decoding of these": lambda: x_column.decode(codes),
        "dy: stochastic values of both": lambda: of_dy(x, KEY, None, KEY, None),
        "x: values of both": lambda: kept(x, None, None, None, None),
    }


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    instructions = counter()
    machine = Machine(threads=1)
    counts = dict.fromkeys(forms(machine, 16), 0.0)
    for tokens, sign in ((TOKENS, -1), (2 * TOKENS, 1)):
        for form, call in forms(machine, tokens).items():
            counts[form] += sign * instructions(call) / TOKENS / FEATURES
    codes, decoding, of_dy, values = counts.values()
    counts |= {
        "a layer": codes + decoding + of_dy,
        "a layer that keeps values of x": values + of_dy,
    }
    for form, count in counts.items():
        print(f"| {form} | {count:.2f} |", flush=True)


if __name__ == "__main__":
    main()
