"""What a process trains on, for the record in the history: machine, device, versions, and the data's fingerprint."""

from __future__ import annotations

import os
import platform
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fp4train import __version__
from fp4train.hardware import Device, driver_version

PACKAGES = ("torch", "numpy", "transformer_engine", "triton")
"""Whose versions change what a run computes, or how fast."""


def environment(device: torch.device, fingerprint: str, ranks: int) -> dict[str, Any]:
    """Plain JSON values.

    Args:
        device: what this rank computes on. fingerprint: of the tokens; runs with equal ones have equal data.
        ranks: how many processes train together.
    """
    versions = {"fp4train": __version__, "python": platform.python_version()}
    versions |= {name: found for name in PACKAGES if (found := _version(name)) is not None}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    if (driver := driver_version()) is not None:
        versions["driver"] = driver
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(Device.of(device)),
        "ranks": ranks,
        "data": fingerprint,
        "versions": versions,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"
