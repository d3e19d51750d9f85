"""A machine that this one is not: what it has installed, and what its processors can do.

Only this file knows which functions of the package ask the machine.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4train.backends import emulate, native, scaled
from fp4train.backends.te import availability, translate
from fp4train.lab.doctor import machine
from fp4train.models.common import liger, scan, scan_kernels
from fp4train.nn.executors import joined
from fp4train.quantize import triton, triton_launch
from fp4train.run import checks, host
from fp4train.run.supervise import audit_report


class Machine:
    """What the package finds, until the patch is undone.

    Args:
        patch: undoes it; in a test its `monkeypatch`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def has_transformer_engine(self, *version: int) -> None:
        """This version of Transformer Engine is installed; without a number, none."""
        for module in (availability, translate):
            self.patch.setattr(module, "version", lambda: version or None)

    def has_liger(self, version: tuple[int, ...] | None) -> None:
        """This version of liger-kernel is installed; None: none."""
        self.patch.setattr(liger, "installed_version", lambda: version)

    def quantises_by_triton(self) -> None:
        """Triton's kernels quantise on every device."""
        self.patch.setattr(triton, "why_not_here", lambda device: None)

    def multiplies_by_triton(self) -> None:
        """Triton's kernels multiply on every device."""
        self.patch.setattr(scaled, "why_not_here", lambda device: None)

    def interprets_triton(self, interprets: bool) -> None:
        """Triton's kernels are interpreted, or compiled."""
        for module in (triton_launch, scaled):
            self.patch.setattr(module, "interpreted", lambda: interprets)

    def multiplies_like_a_gpu(self, *, cublas: Any, processors: int = 132) -> None:
        """A GPU with so many multiprocessors multiplies with scales: by this cuBLAS, or None."""
        self.patch.setattr(scaled, "processors", lambda device: processors)
        self.patch.setattr(scaled.ScaledProducts, "_cublas_on", lambda self, device: cublas)

    def multiplies_blocks(self) -> None:
        """`scaled_mm` takes scales of blocks."""
        self.patch.setattr(native, "why_not_blocks", lambda *arguments: None)

    def lacks_instructions_for(self, *dtypes: torch.dtype) -> None:
        """The CPU has instructions for products of all dtypes but these."""
        for module in (emulate, joined):
            self.patch.setattr(module, "WITHOUT_INSTRUCTIONS", frozenset(dtypes))

    def has_cpu(self, name: str, instructions: str) -> None:
        """The CPU of this name with these instructions."""
        self.patch.setattr(host, "cpu_name", lambda: name)
        self.patch.setattr(host, "instructions", lambda: instructions)

    def has_main_memory(self, size: int) -> None:
        """So many bytes of main memory."""
        self.patch.setattr(checks, "main_memory", lambda: size)

    def has_free_memory(self, size: int) -> None:
        """So many bytes of main memory that are free."""
        self.patch.setattr(audit_report, "free_memory", lambda: size)

    def has_driver(self, version: str) -> None:
        """NVIDIA's driver in this version."""
        for module in (host, machine):
            self.patch.setattr(module, "driver_version", lambda: version)

    def has_torch_for(self, cuda: str | None, **functions: Callable[..., Any]) -> None:
        """A torch that is built for this CUDA, whose module of GPUs has these functions."""
        self.patch.setattr(torch.version, "cuda", cuda)
        for name, function in functions.items():
            self.patch.setattr(torch.cuda, name, function)

    def lacks_package(self, package: str) -> None:
        """This package is not installed."""
        installed = host.package_version
        for module in (host, machine):
            self.patch.setattr(
                module, "package_version", lambda name: None if name == package else installed(name)
            )

    def runs_liger(self) -> None:
        """liger-kernel runs on every device."""
        self.patch.setattr(liger, "why_not", lambda device: None)

    def runs_mamba_kernels_on(self, device: str) -> None:
        """The kernels of mamba-ssm and causal-conv1d are for this type of device."""
        self.patch.setattr(scan_kernels, "DEVICE", device)

    def sums_in_order(self, when: Callable[[Tensor], bool]) -> None:
        """`when` says of a tensor whether its running sums must be taken in order."""
        self.patch.setattr(scan, "_needs_order", when)
