"""Products a·bᵀ of operands blocked along their last axis, one backend a file.

Each backend has the same three verbs: `why_not(first, second, device)` says why it cannot multiply operands of these
specs there (None: it can), `prepare(x, spec)` quantises an operand into the form it multiplies, `product(a, b)`
multiplies.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

from fp4train.backends import emulate, native, reference
from fp4train.backends.matmul import matmul
from fp4train.backends.widening import widened
from fp4train.quantize import QuantSpec
from fp4train.text import check_choice

__all__ = ["BACKENDS", "matmul", "select", "widened"]

BACKENDS: dict[str, ModuleType] = {"emulate": emulate, "native": native, "reference": reference}

_log = logging.getLogger(__name__)


@cache
def select(backend: str, first: QuantSpec | None, second: QuantSpec | None, device: str) -> tuple[ModuleType, str]:
    """The backend that multiplies such operands on `device`, and why: `backend` where it can, else emulation.

    `backend="auto"` takes native products where a GPU has them: on a CPU they are slower than emulation. Falling back
    from a named backend is logged once. Operands in high precision are torch's to multiply, whatever the backend.

    Raises:
        ValueError: there is no such backend.
    """
    check_choice("backend", backend, ("auto", *BACKENDS))
    if first is None and second is None:
        return emulate, "high precision"
    if backend == "auto" and device == "cpu":
        return emulate, "auto: emulated on CPUs"
    if backend == "auto":
        reason = native.why_not(first, second, device)
        return (native, "auto: the GPU multiplies these codes") if reason is None else (emulate, f"auto: {reason}")
    reason = BACKENDS[backend].why_not(first, second, device)
    if reason is None:
        return BACKENDS[backend], f"backend={backend}"
    _log.warning("backend=%s cannot run this GEMM (%s); emulating it", backend, reason)
    return emulate, f"{backend}: {reason}"
