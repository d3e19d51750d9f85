"""An optimizer step that the device decides on, so that the host does not wait for the gradients to be checked."""

from __future__ import annotations

import torch
from torch import Tensor


def step_unless(optimizer: torch.optim.Optimizer, failed: Tensor) -> None:
    """`optimizer.step()` where `failed` is False; where it is True, weights, moments and step counts stay as they are.

    torch's fused optimizers take the flag into their kernel, as they do for `torch.amp.GradScaler`. For others the host
    waits until the flag is known.

    Args:
        optimizer: whose gradients are ready.
        failed: bool [], on the device of the parameters.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        if not bool(failed):
            optimizer.step()
        return
    optimizer.found_inf = failed.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
