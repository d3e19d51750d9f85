"""The fused C kernels for CPUs."""

from fp4train.kernels.cpu.adapter import (
    COLUMN_BLOCKS,
    HERE,
    NO_RANDOM,
    PAIR_ROWS,
    ROW_BLOCKS,
    Kernels,
    Machine,
    Scheme,
    instruction_sets,
    thread_pool,
    unavailable,
)

__all__ = [
    "COLUMN_BLOCKS",
    "HERE",
    "NO_RANDOM",
    "PAIR_ROWS",
    "ROW_BLOCKS",
    "Kernels",
    "Machine",
    "Scheme",
    "instruction_sets",
    "thread_pool",
    "unavailable",
]
