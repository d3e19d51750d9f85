"""The device of a run: chosen, refused where it is too old, and made to repeat its bits.

`train.deterministic=true`: GPUs compute the same bits again.

On a CPU runs repeat to the bit anyway. On a GPU three things do not by default: torch's operations that add by atomics,
the backward pass of flash attention, and cuBLAS, which may share one workspace between streams. What is set here is
what PyTorch's notes on reproducibility and torchtitan (distributed/utils.py) set. fp4train's own kernels need nothing:
their only atomic is an integer maximum.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp4train.errors import UserError
from fp4train.hardware import OLDEST_GPU, driver_version, why_no_gpu
from fp4train.parallel.launch import ProcessRank

_log = logging.getLogger(__name__)

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""The values of `CUBLAS_WORKSPACE_CONFIG` with which cuBLAS repeats itself."""


def choose_device(name: str, place: ProcessRank | None = None) -> torch.device:
    """ "auto" is a GPU where there is one; of several ranks on a machine each takes the GPU of its number.

    A GPU becomes the current one of the process: NCCL and FSDP2 take that. Where "auto" takes the CPU although a GPU's
    driver is here, a warning says why.

    Raises:
        UserError: there is no such device, it is taken by another rank, or it is too old: it has no BF16 products.
    """
    if name == "auto" and not torch.cuda.is_available() and driver_version() is not None:
        _log.warning("the run uses the CPU: %s", why_no_gpu())
    seen = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(seen if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda: fp4train has no kernels for {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}: torch sees no GPU here; use device=cpu")
    if device.type == "cpu":
        return device
    if place is not None and place.size > 1:
        if device.index is not None:
            raise UserError(f"device={name}: several ranks cannot share one GPU; device=cuda gives each its own")
        if place.local_rank >= (there := torch.cuda.device_count()):
            raise UserError(
                f"{place.local_size} ranks on a machine with {there} GPUs: start one per GPU, or device=cpu"
            )
        device = torch.device("cuda", place.local_rank)
    if device.index is not None:
        torch.cuda.set_device(device)
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        have, least = (".".join(map(str, c)) for c in (capability, OLDEST_GPU))
        raise UserError(
            f"device={name}: {torch.cuda.get_device_name(device)} has compute capability {have} and no BF16 products, "
            f"which need {least}; use device=cpu"
        )
    return device


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Inside, a run repeats to the bit on the same GPU, torch and number of ranks; afterwards all is as before.

    Attention takes the flash kernel, whose backward has a deterministic mode, or torch's plain one. An operation that
    has no deterministic form raises torch's error, which names it.

    Raises:
        UserError: cuBLAS runs already, or is told to use workspaces with which it does not repeat itself.
    """
    if not wanted:
        yield
        return
    if torch.cuda.is_available():
        _set_workspace()
    # torch types none of these.
    cuda: Any = torch.backends.cuda
    memory: Any = torch.utils.deterministic
    matmul = cuda.matmul
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills, benchmarks = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    attention = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_cudnn_sdp(False)
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fills, benchmarks
        cuda.enable_mem_efficient_sdp(attention[0])
        cuda.enable_cudnn_sdp(attention[1])
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = reduced


def _set_workspace() -> None:
    """Tell cuBLAS, which reads the variable when it starts."""
    given = os.environ.get(CUBLAS)
    if given is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ[CUBLAS] = WORKSPACES[0]
    elif given is None:
        raise UserError(
            f"train.deterministic=true: the GPU is in use already; start the process with {CUBLAS}={WORKSPACES[0]}"
        )
    elif given not in WORKSPACES:
        raise UserError(
            f"train.deterministic=true: {CUBLAS}={given} does not let cuBLAS repeat itself; "
            f"unset it, or set {' or '.join(WORKSPACES)}"
        )
