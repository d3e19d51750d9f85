"""Whether main memory has room for the audit of a layer, whose tensors are all copied there.

By emulation in NVFP4, the largest of the recipes with a backend that multiplies BF16, a layer
[N, K] and M tokens take bytes of

    14·N·K + 9·M·K + 10·M·N      for the record of a call
    4·N·K                        for the weight of the optimizer, of all experts
    `COMPARING`·max(…)           for the comparison: of N·K, M·K and M·N
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fp4train.nn.planned import PlannedLayer

COMPARING: Final = 40
"""Bytes for each element of the largest operand: its codes are made again in float32, and the
product of some rows is computed in float64.
"""
_GIB: Final = 2**30


def needed(layer: PlannedLayer, tokens: int) -> int:
    """Bytes of main memory that the audit of a layer takes in passes of so many tokens."""
    in_features = layer.layer.in_features
    out_features = layer.layer.out_features
    weights = out_features * in_features
    inputs = tokens * in_features
    outputs = tokens * out_features
    record = 14 * weights + 9 * inputs + 10 * outputs
    gathered = 4 * layer.weight.numel()
    return record + gathered + COMPARING * max(weights, inputs, outputs)


def check_main_memory(layer: PlannedLayer, tokens: int, ranks: int) -> None:
    """Check that main memory has room for the audits that the ranks of this machine make at once.

    Raises:
        MemoryError: it has not.
    """
    free = free_memory()
    total = needed(layer, tokens) * ranks
    if free is not None and total > free:
        raise MemoryError(
            f"its audit takes about {total / _GIB:.1f} GiB of main memory, and "
            f"{free / _GIB:.1f} GiB are free"
        )


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process may still take; None: the system does not say.

    Args:
        root: folder that has proc and sys.
    """
    limits = []
    meminfo = _numbers(root / "proc/meminfo", ":")
    if "MemAvailable" in meminfo:
        limits.append(meminfo["MemAvailable"] * 1024)
    group = root / "sys/fs/cgroup"
    most = _number(group / "memory.max")
    used = _number(group / "memory.current")
    if most is not None and used is not None:
        cached = _numbers(group / "memory.stat").get("inactive_file", 0)
        limits.append(max(0, most - used + cached))
    return min(limits, default=None)


def _numbers(path: Path, end: str = "") -> dict[str, int]:
    """The numbers of a file of lines "name 123", or "name: 123 kB"; empty: there is none."""
    numbers = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            numbers[words[0].removesuffix(end)] = int(words[1])
    return numbers


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
