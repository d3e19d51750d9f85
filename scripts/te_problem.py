"""The layer that te_selfcheck.py compares, and what it found of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train.precision.layers import Layer

REFERENCE = 1e-6
REFERENCE_BF16 = 1e-3
NATIVE = 1e-2
STOCHASTIC = 0.1
"""Tolerances: relative to the norm; the last one relative between two quantisation errors."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result: what was compared, the three distances, the tolerance, or why it was
    skipped.
    """

    part: str
    name: str
    y: float | None = None
    dx: float | None = None
    dw: float | None = None
    tolerance: str = ""
    agrees: bool | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [M, K], w [N, K], dy [M, N] in BF16."""

    x: Tensor
    w: Tensor
    dy: Tensor

    @staticmethod
    def draw(tokens: int, in_features: int, out_features: int, device: str) -> Problem:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

        x = normal(tokens, in_features)
        x[:, ::97] *= 20  # outlier channels, as activations have
        return Problem(x=x, w=normal(out_features, in_features), dy=normal(tokens, out_features))


Products = tuple[Tensor, Tensor, Tensor]


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖ in float64; NaN anywhere gives NaN, which no tolerance passes."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def compare(part: str, name: str, ours: Products, theirs: Products, tolerance: float) -> Row:
    y, dx, dw = (distance(a, b) for a, b in zip(theirs, ours, strict=True))
    agrees = all(value <= tolerance for value in (y, dx, dw))
    return Row(part=part, name=name, y=y, dx=dx, dw=dw, tolerance=f"{tolerance:g}", agrees=agrees)


def place(problem: Problem) -> Layer:
    out_features, in_features = problem.w.shape
    return Layer(
        name="selfcheck", in_features=in_features, out_features=out_features, block=0, blocks=1
    )
