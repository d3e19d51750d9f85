"""What `model=…` binds to. A new model is a folder whose `model.py` has such a class, and a YAML in `configs/model`."""

from __future__ import annotations

from typing import Protocol

from torch import nn


class Architecture(Protocol):
    """The shape of a model.

    The module that `build` returns is called as `model(tokens, targets)`, int64 [B, T] each, and gives the mean loss in
    nats per token; `model(tokens)` gives logits [B, T, vocabulary]. Its repeated blocks stand in an `nn.ModuleList`, or
    it names them (`precision.blocks`), so that a policy can count them. It carries its activations in
    `activation_dtype(…)` of the autocast context.
    """

    def build(self, *, vocab_size: int, seq_len: int) -> nn.Module:
        """The model with freshly drawn weights."""
        ...
