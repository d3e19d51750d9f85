"""Amaxes that scale operands, measured by the readable reference (`quantize.reference`)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fp4train.quantize import QuantSpec, RandomKey, amax_extent, reference


class Amaxes(NamedTuple):
    """The amaxes that scale an operand, and what it requantises; None: their own."""

    operand: Tensor | None = None
    inner: Tensor | None = None


def measured(tensor: Tensor, spec: QuantSpec, key: RandomKey | None = None) -> Tensor | None:
    """The amax that scales a tensor, 0-d or one per row; None: its scales are those of blocks."""
    if amax_extent(spec) is None:
        return None
    return reference.scale_tensor(tensor, spec, None, key).amax


def measured_inner(tensor: Tensor, spec: QuantSpec) -> Tensor | None:
    """The amax that scales what `spec` requantises; None: there is none."""
    return None if spec.requantises is None else measured(tensor.T, spec.requantises)


def measured_outer(
    tensor: Tensor, spec: QuantSpec, key: RandomKey | None, inner: Tensor | None
) -> Tensor | None:
    """`measured` of what `spec` makes of a tensor before it quantises.

    Args:
        inner: amax of what it requantises; None: that of the tensor.
    """
    if inner is not None and spec.requantises is not None:
        rounded = reference.quantize(tensor.T, spec.requantises, amax=inner)
        tensor = rounded.restore(torch.bfloat16).T
        spec = replace(spec, requantises=None)
    return measured(tensor, spec, key)
