"""The seconds that the host takes to queue a step: measured shares of Python, and launches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fp4train.lab.costs.rows import active_experts
from fp4train.precision.layer_plan import LayerPlan

OPERATION: Final = 6e-6
"""Seconds of the host per operation between products that eager torch queues: assumed, of 5 to 10
µs from Python."""

HOST: Final[Mapping[str, float]] = MappingProxyType(
    {"te": 143e-6, "native": 97e-6, "emulate": 211e-6, "reference": 827e-6, "torch": 29e-6}
)
"""Seconds of the host per linear layer, forward and backward, by backend: what Python and torch's
dispatcher take on a CPU, where kernels only allocate their results, for NVFP4, the slowest recipe
(scripts/host_time.py, benchmarks/cost_model.md), and 3 µs for each launch: three products, and
four kernels that quantise; in emulation twice as many."""

EXPERT: Final = 0.6
"""Share of the host's seconds per linear layer that a further expert of a layer takes: 0.55 to
0.66, in emulated NVFP4 and MXFP8 and in BF16 on a CPU (32 experts of 32 features and 32 rows)."""


def host_seconds(plan: LayerPlan, tokens: int) -> float:
    """Seconds of the host to queue a layer once, forward and backward. Experts are queued one by
    one; Transformer Engine takes all at once.
    """
    seconds = max(HOST[gemm.backend] for gemm in plan.gemms)
    if plan.layer_backend is not None:
        return seconds
    return seconds * (1 + EXPERT * (active_experts(plan, tokens) - 1))
