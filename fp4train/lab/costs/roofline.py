"""The time of a product and of a memory pass on a named GPU: a roofline with few parameters.

    GEMM, m×n×k      max(2·m·n·k / rate(s), bytes / (bandwidth · COPY)) + LAUNCH,  s = (m·n·k)^(1/3)
    rate(s)          peak · gemm_share · s / (s + half)
    half             EXPOSED · peak · gemm_share / (bandwidth · COPY)
    a pass           (bytes read + written) / (bandwidth · share) + LAUNCH

`half` is the size at which a GEMM reaches half of its rate. It grows with the rate: loading the
first tiles, writing the last ones and the partial last wave take a time proportional to the area of
the matrices in every format, so a faster format needs a larger product to reach its rate. Bytes of
a pass that fit into the L2 cache move L2_SPEEDUP times faster, since the previous kernel has just
written them there.

Peaks and bandwidths are published (`hardware.py`); the parameters below are calibrated, each
against the measurement named with it. `benchmarks/cost_model.md` compares the result with
measurements.
"""

import math
from typing import Final

from fp4train.formats import formats_of, product_rate
from fp4train.hardware import Gpu, stored_bytes

COPY: Final = 0.90
"""Share of the bandwidth that a copy reaches: 4.3 of 4.8 TB/s measured on an H200. There a later
`copy_` of 0.5 GB reached 2.73, read and written bytes counted (benchmarks/h200.md)."""

LAUNCH: Final = 0.7e-6
"""Seconds from the end of one kernel to the start of the next in a queue that is never empty. From
the sizes at which quantising begins to pay on B200, which depend on it most: near 2048³ for MXFP8
and 1800³ for NVFP4."""

EXPOSED: Final = 3.0
"""Bytes per element of an output-sized matrix whose transfer no GEMM hides. From cuBLAS FP4 on B200
at 8192³ and 4096×4096×7168: 5239 and 3939 TFLOP/s (DeepGEMM, pull request 348)."""

L2_SPEEDUP: Final = 2.5
"""Bandwidth of the L2 cache divided by that of the memory."""

SUSTAINED: Final = 0.82
"""Rate of products in training over that of a short benchmark: clocks fall under a long load."""

_BLACKWELL_ULTRA: Final = (10, 3)


def gemm_share(gpu: Gpu, rate: str) -> float:
    """Share of the peak that a large GEMM reaches.

    0.88 (BF16 on H200 at 8192³: 790 of 989 TFLOP/s with the effect of the size; on B200 at 16384³
    near 2000, 4000 and 6000 of 2250, 4500 and 9000 in BF16, MXFP8 and NVFP4), except on Blackwell
    Ultra. There TE's published benchmark reached 0.72 of the peak in BF16 and 0.71 in MXFP8, and
    0.43 of the 15 PFLOP/s of NVFP4, which is 0.72 of B200's 9: that benchmark does not show the
    increase of the FP4 peak by two thirds.
    """
    if gpu.capability != _BLACKWELL_ULTRA:
        return 0.88
    return 0.43 if rate == "FP4" else 0.72


def sustained(gpu: Gpu) -> float:
    """`SUSTAINED`: Transformer Engine's benchmark on B300 reaches 0.72 of the BF16 peak where short
    ones on H200 and B200 reach 0.88 (`gemm_share`). Rates of B300 and GB300 come from that
    benchmark and are not lowered again.
    """
    return 1.0 if gpu.capability == _BLACKWELL_ULTRA else SUSTAINED


def half_size(gpu: Gpu, rate: str) -> float:
    """The size s of a product s³ at which `gpu` reaches half of its large-GEMM rate."""
    return EXPOSED * gpu.peaks[rate] * gemm_share(gpu, rate) / (gpu.bandwidth * COPY)


def gemm_seconds(
    gpu: Gpu, elements: str, m: float, n: float, k: float, *, products: int = 1
) -> float:
    """Time of one product [m, k]·[k, n] of `elements` ("E2M1·E2M1", "BF16"), without quantising.

    Args:
        products: number of products of this size in one call; their tiles fill the GPU together.

    Raises:
        ValueError: the GPU has no such rate.
    """
    formats = formats_of(elements)
    rate = product_rate(*formats)
    if rate is None or rate not in gpu.peaks:
        raise ValueError(f"{gpu} does not multiply {elements}: it has {', '.join(gpu.peaks)}")
    volume = products * m * n * k
    slower = 1 + half_size(gpu, rate) / math.cbrt(volume)
    compute = 2 * volume / (gpu.peaks[rate] * gemm_share(gpu, rate)) * slower
    operands = m * k * stored_bytes(formats[0].bits) + n * k * stored_bytes(formats[-1].bits)
    moved = products * (operands + 2 * m * n)
    return max(compute, moved / (gpu.bandwidth * COPY)) + LAUNCH


def move_seconds(gpu: Gpu, moved: float, share: float = COPY) -> float:
    """Time of one kernel that reads and writes `moved` bytes and reaches `share` of the
    bandwidth.
    """
    cached = min(moved, gpu.l2)
    return (cached / L2_SPEEDUP + moved - cached) / (gpu.bandwidth * share) + LAUNCH
