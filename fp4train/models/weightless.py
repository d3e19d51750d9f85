"""A model on the meta device: its modules, names and shapes, without the memory of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from fp4train.models import Architecture


class _Undrawn(TorchFunctionMode):
    """Weights on the meta device have no values, and torch would load its compiler to draw them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.normal_:
            return (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def build_weightless(shape: Architecture, *, vocab_size: int, seq_len: int) -> nn.Module:
    """The model of `shape` on the meta device.

    Raises:
        ValueError: it cannot be built.
        RuntimeError: it reads values of tensors while it is built.
    """
    with torch.device("meta"), _Undrawn():
        return shape.build(vocab_size=vocab_size, seq_len=seq_len)
