"""The seconds that the host takes to queue a step, by what it queues: measured shares of Python, and launches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fp4train.precision.layer_plan import LayerPlan

OPERATION: Final = 6e-6
"""Seconds of the host per operation between products that eager torch queues: assumed, of 5 to 10 µs from Python."""

LAUNCHED: Final = 3e-6
"""Seconds of the host per kernel: a launch of Triton without its JIT, measured on a CPU (scripts/host_time.py)."""

_PYTHON = {"te": 122e-6, "native": 76e-6, "emulate": 169e-6, "reference": 806e-6, "torch": 20e-6}
HOST: Final[Mapping[str, float]] = MappingProxyType(
    {name: seconds + LAUNCHED * {"torch": 3, "emulate": 14}.get(name, 7) for name, seconds in _PYTHON.items()}
)
"""Seconds of the host per linear layer, forward and backward, by backend: what Python and torch's dispatcher take on a
CPU, where kernels only allocate their results, for NVFP4, the slowest recipe (scripts/host_time.py, docs/cost-model.md;
emulation and reference with their products of 32 features), and the launches: three products, and four kernels that
quantise; in emulation two more of each product and one that decodes x."""

EXPERT, PRODUCT = 0.6, 0.09
"""Shares of the host's seconds per linear layer that a further expert of a layer takes, and one product: 0.55 to 0.66,
and 0.08 to 0.09, in emulated NVFP4 and MXFP8 and in BF16 on a CPU (32 experts of 32 features and 32 rows)."""


def host_seconds(plan: LayerPlan, tokens: int) -> float:
    """Seconds of the host to queue a layer once, forward and backward. Experts are quantised, and multiplied where no
    product is one of all, one by one; Transformer Engine takes all at once."""
    layer, backend = plan.layer, max((gemm.backend for gemm in plan.gemms), key=HOST.__getitem__)
    seconds = HOST[backend]
    if not layer.experts or plan.layer_backend is not None:
        return seconds
    further = min(layer.experts, layer.rows(tokens)) - 1
    return seconds * (1 + further * (EXPERT - PRODUCT * sum(gemm.grouped for gemm in plan.gemms)))
