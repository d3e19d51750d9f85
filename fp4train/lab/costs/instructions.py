"""The time that fp4train's kernels take to issue their instructions on a named GPU:

    elements · instructions per element / (ISSUE · lanes · clock)

Half of the published FP32 peak is lanes · clock: 128 lanes per multiprocessor of the GPUs that are
counted, as many as four schedulers issue to. A100 has half of them, so its time is an upper bound.
"""

from fp4train.hardware import Gpu
from fp4train.quantize import QuantSpec

ISSUE = 0.76
"""Share of lanes · clock that kernels issue to: three NVFP4 kernels of 16,384² elements on an H200
reach 25.4 to 25.7 of 33.5 · 10¹² per second (benchmarks/h200.md). It is calibrated
to no step."""

COUNTED = (89, 90, 100, 120)
"""Compute capabilities (times ten) with counts; other GPUs take those of the nearest, Instinct
GPUs those of 9.0."""

INSTRUCTIONS = {
    "4 bits": (49.2, 49.7, 47.1, 49.4),
    "4 bits, stochastic": (69.0, 69.8, 67.2, 69.7),
    "8 bits": (33.7, 31.5, 31.0, 31.7),
    "8 bits, one scale": (16.3, 15.8, 15.6, 15.7),
    "amax": (11.0, 11.0, 10.5, 11.1),
    "amax, stochastic": (13.5, 13.8, 13.3, 13.8),
    "4 bits decoded": (10.0, 10.4, 9.4, 10.5),
    "8 bits decoded": (5.5, 5.7, 5.2, 5.8),
}
"""Kernel → SASS instructions per element (benchmarks/kernel_instructions.md): of both forms as codes,
of the amaxes of both forms where one is transformed, of decoding."""


def issue_seconds(gpu: Gpu, count: int, kernel: str) -> float:
    """Time of issuing the instructions of a kernel of `INSTRUCTIONS` for `count` elements."""
    major, minor = gpu.capability or (9, 0)
    nearest = min(COUNTED, key=lambda counted: abs(counted - 10 * major - minor))
    instructions = INSTRUCTIONS[kernel][COUNTED.index(nearest)]
    return count * instructions / (ISSUE * gpu.peaks["FP32"] / 2)


def quantising_kernel(spec: QuantSpec) -> str:
    """The counted kernel that is most like that of a spec."""
    if spec.format.bits <= 4:
        return "4 bits, stochastic" if spec.random else "4 bits"
    return "8 bits, one scale" if None in spec.block else "8 bits"
