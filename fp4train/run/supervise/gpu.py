"""What GPUs do to runs: one that is too old or not seen is said before a run, and one that fails during it is named.

A GPU that runs out of memory can be mended by smaller microbatches, which leave the results of a step as they are. One
that fails (an illegal access, a bus error, a GPU that left the bus) is lost for its process: the run goes on from its
last checkpoint, in another process.
"""

from __future__ import annotations

import logging
import re

import torch

from fp4train.errors import LostError, UserError
from fp4train.hardware import OLDEST_GPU, driver_version, stored_bytes, why_no_gpu
from fp4train.precision.plan import LayerPlan
from fp4train.run.run import Run
from fp4train.run.supervise.rescue import steps_saved

_log = logging.getLogger(__name__)

_FAILED = re.compile(r"CUDA error|CUBLAS_STATUS_(?!NOT_SUPPORTED|INVALID_VALUE)\w+|NCCL error|device-side assert")


def warn_of_unseen_gpu(name: str) -> None:
    """Warn of a driver that does not go with this torch where the CPU is used instead (device=auto)."""
    if name == "auto" and not torch.cuda.is_available() and driver_version() is not None:
        _log.warning("the run uses the CPU: %s", why_no_gpu())


def check_gpu(device: torch.device, name: str) -> None:
    """Refuse a GPU that is too old, which `device=name` would use.

    Raises:
        UserError: it has no BF16 products.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        have, least = (".".join(map(str, c)) for c in (capability, OLDEST_GPU))
        raise UserError(
            f"device={name}: {torch.cuda.get_device_name(device)} has compute capability {have} and no BF16 products, "
            f"which need {least}; use device=cpu"
        )


def explain(error: Exception, run: Run) -> UserError | None:
    """What to do about an error of the GPU or for want of memory that ended `run`, as an error; None for any other."""
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return UserError(f"{run.directory}: step {run.step} does not fit into memory: {_asked(text)}. {_smaller(run)}")
    if not isinstance(error, RuntimeError) or not _FAILED.search(str(error)):
        return None
    where = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else str(run.device)
    return LostError(
        f"{run.directory}: the GPU failed in step {run.step} ({where}, {run.device}): {text.rstrip('.')}. This process "
        f"cannot use it any more; nvidia-smi and the kernel's log (NVRM: Xid) tell why. {_there(run)}"
    )


def _asked(text: str) -> str:
    """How much was asked for, in torch's words or ours."""
    if found := re.search(r"you tried to allocate (\d+) bytes", text):
        return f"{int(found[1]) / 2**30:,.1f} GiB were asked for"
    return text.rstrip(".") or "no more can be had"


def _smaller(run: Run) -> str:
    """Which settings take less memory, with the plan's own numbers."""
    config = run.config.train
    rows = config.microbatch or config.batch_size
    kept = sum(_kept(layer, rows * config.seq_len) for layer in run.plan.at(run.step).layers.values())
    words = [
        f"A forward pass of {rows} × {config.seq_len} tokens keeps up to {kept / 2**30:,.2f} GiB for the backward of "
        "the linear layers alone"
    ]
    tries = []
    if fewer := next((n for n in range(rows // 2, 0, -1) if config.batch_size % n == 0), None):
        tries.append(f"train.microbatch={fewer} (the same gradients, {kept * fewer / rows / 2**30:,.2f} GiB)")
    if getattr(run.config.model, "recompute", True) is False:
        tries.append("model.recompute=true (keeps only the inputs of the blocks)")
    if not tries:
        tries.append("a smaller model or train.seq_len, or more GPUs")
    words.append(_there(run, f" with {' or '.join(tries)}"))
    return ". ".join(words)


def _kept(layer: LayerPlan, tokens: int) -> float:
    """Bytes that a layer keeps of its input: the codes for wgrad, or the input itself."""
    return sum(
        tokens * part.layer.in_features * stored_bytes(part.wgrad.elements.rpartition("·")[2]) for part in layer.parts
    )


def _there(run: Run, how: str = "") -> str:
    """The checkpoint that is there, and how to go on."""
    if steps := steps_saved(run):
        return f"The checkpoint of step {steps[-1]} stays: resume={run.directory} goes on{how}"
    return f"There is no checkpoint: begin again{how}"
