"""Whether main memory has room for the audit of a layer, whose tensors are all copied there.

A layer [N, K] and M tokens take bytes of

    14·N·K + 9·M·K + 10·M·N      for the record of a call, by emulation in NVFP4
    `OTHERS` times as many       in the recipe with the largest records
    4·N·K                        for the weight of the optimizer, of all experts
    `COMPARING`·max(…)           for the comparison: of N·K, M·K and M·N

Where every step is audited, two layers are observed in each: that of the step, and that of the next
one, whose operands of the step before are kept.
"""

from __future__ import annotations

from typing import Final

from fp4train.nn.planned import PlannedLayer
from fp4train.run.host import free_memory

COMPARING: Final = 40
"""Bytes for each element of the largest operand: its codes are made again in float32, and the
product of some rows is computed in float64.
"""
OTHERS: Final = 1.3
"""The most that records of other recipes are larger than those of NVFP4: 1.27 was measured."""
_GIB: Final = 2**30


def needed(layer: PlannedLayer, tokens: int, observed: int = 1) -> int:
    """Bytes of main memory that the audit of a layer takes in passes of so many tokens.

    Args:
        observed: number of layers of this size that are observed in a step.
    """
    in_features = layer.layer.in_features
    out_features = layer.layer.out_features
    weights = out_features * in_features
    inputs = tokens * in_features
    outputs = tokens * out_features
    record = int(OTHERS * (14 * weights + 9 * inputs + 10 * outputs))
    gathered = 4 * layer.weight.numel()
    return observed * record + gathered + COMPARING * max(weights, inputs, outputs)


def check_main_memory(layer: PlannedLayer, tokens: int, ranks: int, observed: int = 1) -> None:
    """Check that main memory has room for the audits that the ranks of this machine make at once.

    Args:
        observed: number of layers that are observed in a step, as `needed` has it.

    Raises:
        MemoryError: it has not.
    """
    free = free_memory()
    total = needed(layer, tokens, observed) * ranks
    if free is not None and total > free:
        raise MemoryError(
            f"its audit takes about {total / _GIB:.1f} GiB of main memory, and "
            f"{free / _GIB:.1f} GiB are free"
        )
