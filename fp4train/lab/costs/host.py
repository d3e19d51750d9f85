"""The seconds that the host takes to queue a step: measured shares of Python, and launches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fp4train.precision.layer_plan import LayerPlan

OPERATION: Final = 6e-6
"""Seconds of the host per operation between products that eager torch queues: assumed, of 5 to 10
µs from Python."""

LAUNCHED: Final = 3e-6
"""Seconds of the host per kernel: a launch of Triton without its JIT, measured on a CPU
(scripts/host_time.py)."""

_PYTHON = {"te": 122e-6, "native": 76e-6, "emulate": 169e-6, "reference": 806e-6, "torch": 20e-6}
_LAUNCHES = {"te": 7, "native": 7, "emulate": 14, "reference": 7, "torch": 3}
HOST: Final[Mapping[str, float]] = MappingProxyType(
    {backend: python + LAUNCHED * _LAUNCHES[backend] for backend, python in _PYTHON.items()}
)
"""Seconds of the host per linear layer, forward and backward, by backend: what Python and torch's
dispatcher take on a CPU, where kernels only allocate their results, for NVFP4, the slowest recipe
(scripts/host_time.py, benchmarks/cost_model.md; emulation and reference with their products of 32
features), and the launches: three products, and four kernels that quantise; in emulation two more
of each product and one that decodes x."""

EXPERT: Final = 0.6
"""Share of the host's seconds per linear layer that a further expert of a layer takes: 0.55 to
0.66, in emulated NVFP4 and MXFP8 and in BF16 on a CPU (32 experts of 32 features and 32 rows)."""

PRODUCT: Final = 0.09
"""Share that one product of an expert takes: 0.08 to 0.09, measured alike."""


def host_seconds(plan: LayerPlan, tokens: int) -> float:
    """Seconds of the host to queue a layer once, forward and backward. Experts are quantised, and
    multiplied where no product is one of all, one by one; Transformer Engine takes all at once."""
    seconds = max(HOST[gemm.backend] for gemm in plan.gemms)
    if not plan.layer.experts or plan.layer_backend is not None:
        return seconds
    further = min(plan.layer.experts, plan.layer.rows(tokens)) - 1
    in_one_call = sum(gemm.grouped for gemm in plan.gemms)
    return seconds * (1 + further * (EXPERT - PRODUCT * in_one_call))
