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

Peaks and bandwidths are published, and the shares of them that products reach calibrated
(`hardware.yaml`), as are the parameters below, each against the measurement named with it.
`benchmarks/cost_model.md` compares the result with measurements.
"""

import math

from fp4train.formats import formats_of, product_rate
from fp4train.hardware import Gpu, stored_bytes

COPY = 0.90
"""Share of the bandwidth that a copy reaches: 4.3 of 4.8 TB/s measured on an H200. There a later
`copy_` of 0.5 GB reached 2.73, read and written bytes counted (benchmarks/h200.md)."""

LAUNCH = 0.7e-6
"""Seconds from the end of one kernel to the start of the next in a queue that is never empty. From
the sizes at which quantising begins to pay on B200, which depend on it most: near 2048³ for MXFP8
and 1800³ for NVFP4."""

EXPOSED = 3.0
"""Bytes per element of an output-sized matrix whose transfer no GEMM hides. From cuBLAS FP4 on B200
at 8192³ and 4096×4096×7168: 5239 and 3939 TFLOP/s (DeepGEMM, pull request 348)."""

L2_SPEEDUP = 2.5
"""Bandwidth of the L2 cache divided by that of the memory."""


def large_rate(gpu: Gpu, rate: str) -> float:
    """FLOP/s that a large GEMM reaches."""
    return gpu.peaks[rate] * gpu.gemm_share.get(rate, gpu.gemm_share["others"])


def half_size(gpu: Gpu, rate: str) -> float:
    """The size s of a product s³ at which `gpu` reaches half of its large-GEMM rate."""
    return EXPOSED * large_rate(gpu, rate) / (gpu.bandwidth * COPY)


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
    compute = 2 * volume / large_rate(gpu, rate) * slower
    operands = m * k * stored_bytes(formats[0].bits) + n * k * stored_bytes(formats[-1].bits)
    moved = products * (operands + 2 * m * n)
    return max(compute, moved / (gpu.bandwidth * COPY)) + LAUNCH


def move_seconds(gpu: Gpu, moved: float, share: float = COPY) -> float:
    """Time of one kernel that reads and writes `moved` bytes and reaches `share` of the
    bandwidth.
    """
    cached = min(moved, gpu.l2)
    return (cached / L2_SPEEDUP + moved - cached) / (gpu.bandwidth * share) + LAUNCH
