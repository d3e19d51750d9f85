"""The device of a run, and its host process: Python's garbage collector, glibc's allocator, its
memory, and the record of its machine.

Collector. By default Python's cyclic collector runs whenever some hundreds of objects more were
created than freed. Quantised layers create many small objects that live until backward, and the
collections they cause took 5 % of an NVFP4 step of the default run on a 2-core CPU. A training step
leaves no tensor in a cycle, so nothing is lost by collecting between steps only.

Allocator. glibc returns large blocks to the system when they are freed, and the system zeroes the
pages it hands out again: a fresh 32 MB tensor costs 14 ms of page faults, where writing it takes 2
ms. A training step frees and requests the same sizes over and over, so the process keeps them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import re
import resource
import socket
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fp4train import __version__
from fp4train.errors import UserError
from fp4train.hardware import OLDEST_GPU, Device, driver_version, why_no_gpu
from fp4train.parallel.launch import ProcessRank
from fp4train.run.bits import instructions

_log = logging.getLogger(__name__)

STEPS: int = 10
"""Steps between two collections."""


def choose_device(name: str, place: ProcessRank | None = None) -> torch.device:
    """ "auto" is a GPU where there is one; of several ranks on a machine each takes the GPU of its
    number.

    A GPU becomes the current one of the process: NCCL and FSDP2 take that. Where "auto" takes the
        CPU although a GPU's
    driver is here, a warning says why.

    Raises:
        UserError: there is no such device, it is taken by another rank, or it is too old: it has no
            BF16 products.
    """
    if name == "auto" and not torch.cuda.is_available() and driver_version() is not None:
        _log.warning("the run uses the CPU: %s", why_no_gpu())
    seen = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(seen if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"device={name!r} is not one of auto, cpu, cuda: fp4train has no kernels for "
            f"{device.type}"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}: torch sees no GPU here; use device=cpu")
    if device.type == "cpu":
        return device
    if place is not None and place.size > 1:
        if device.index is not None:
            raise UserError(
                f"device={name}: several ranks cannot share one GPU; device=cuda gives each its own"
            )
        if place.local_rank >= (there := torch.cuda.device_count()):
            raise UserError(
                f"{place.local_size} ranks on a machine with {there} GPUs: start one per GPU, "
                "or device=cpu"
            )
        device = torch.device("cuda", place.local_rank)
    if device.index is not None:
        torch.cuda.set_device(device)
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        have, least = (".".join(map(str, c)) for c in (capability, OLDEST_GPU))
        raise UserError(
            f"device={name}: {torch.cuda.get_device_name(device)} has compute capability "
            f"{have} and no BF16 products, "
            f"which need {least}; use device=cpu"
        )
    return device


class CollectorBetweenSteps:
    """A context in which the collector runs only when `after` calls it; on exit its former state is
    restored.

    A process that has frozen its objects before keeps them so.
    """

    def __enter__(self) -> CollectorBetweenSteps:
        self._enabled = gc.isenabled()
        self._froze = not gc.get_freeze_count()
        gc.collect()
        if self._froze:
            gc.freeze()  # what exists by now stays: later collections need not walk through it
        gc.disable()
        return self

    def after(self, step: int) -> None:
        """Collect if `step`, the number of steps done, is a multiple of `STEPS`."""
        if step % STEPS == 0:
            gc.collect()

    def __exit__(self, *raised: object) -> None:
        if self._froze:
            gc.unfreeze()
        if self._enabled:
            gc.enable()


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors on the GPU `device` have held, or this process on a CPU; waits
    for nothing.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return used
    return used * 1024


# Parameters of mallopt (malloc.h) and their values.
_SETTINGS = (
    (-4, 0),  # M_MMAP_MAX: no block has a mapping of its own, which free would unmap
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: the heap does not shrink
    (-2, 2**28),  # M_TOP_PAD: it grows by 256 MB at a time
)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory; False where it is not glibc, and nothing changes.

    The setting holds for the whole process until it ends, so only programs call this, never `import
    fp4train`.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([bool(mallopt(parameter, value)) for parameter, value in _SETTINGS])


PACKAGES = (
    "torch",
    "numpy",
    "transformer_engine",
    "transformer_engine_torch",
    "triton",
    "liger-kernel",
    "mamba-ssm",
    "causal-conv1d",
)
"""Packages whose versions change what a run computes, or how fast."""


def environment(device: torch.device, fingerprint: str, ranks: int) -> dict[str, Any]:
    """Plain JSON values.

    Args:
        device: device of this rank. fingerprint: of the tokens; runs with equal ones have
            equal data.
        ranks: how many processes train together.
    """
    versions = {"fp4train": __version__, "python": platform.python_version(), **libraries()}
    if (driver := driver_version()) is not None:
        versions["driver"] = driver
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": instructions(),
        "device": str(Device.of(device)),
        "ranks": ranks,
        "data": fingerprint,
        "versions": versions,
    }


def libraries() -> dict[str, str]:
    """The versions of the installed packages that decide what a run computes."""
    versions = {
        name: version_found
        for name in PACKAGES
        if (version_found := package_version(name)) is not None
    }
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions


@cache
def package_version(package: str) -> str | None:
    """The installed version of a package, by the name that pip knows; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model as the system names it, or else its architecture."""
    try:
        match = re.search(
            r"^model name\s*:\s*(.+)$",
            Path("/proc/cpuinfo").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    except OSError:
        match = None
    if match:
        return match[1].strip()
    return platform.processor() or platform.machine()


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
