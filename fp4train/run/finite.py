"""Tensors that hold a NaN or an infinity are found, and named."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp4train.shards import local


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; None if all are finite. Of a
    tensor that is cut over ranks this rank's part is looked at.

    Largest magnitudes, which a NaN makes NaN, a few fused kernels and one number brought to the
    host.
    """
    parts = {name: local(t.detach()) for name, t in tensors.items()}
    floating = {name: t for name, t in parts.items() if t.is_floating_point() and t.numel()}
    if not floating:
        return None
    largest = torch._foreach_norm(list(floating.values()), torch.inf)
    if bool(torch.stack([tensor.float() for tensor in largest]).isfinite().all()):
        return None
    return next(
        name for name, tensor in zip(floating, largest, strict=True) if not bool(tensor.isfinite())
    )


def finite_weights(model: nn.Module) -> bool:
    """Whether a checkpoint of `model` would be worth having."""
    return first_non_finite(dict(model.named_parameters())) is None
