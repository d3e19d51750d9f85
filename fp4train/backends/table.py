"""The table of a linear layer: how each operand of its three GEMMs is quantised. Recipes define it, backends run it.

A linear layer y = x·wᵀ computes three products in training, each with two operands that are blocked along the
contraction axis:

    fprop   y  = x·wᵀ     x [M, K],   w [N, K]      blocked along K (in features)
    dgrad   dx = dy·w     dy [M, N],  wᵀ [K, N]     blocked along N (out features)
    wgrad   dw = dyᵀ·x    dyᵀ [N, M], xᵀ [K, M]     blocked along M (tokens)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fp4train.quantize import QuantSpec

GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""Names of the first and second operand of each GEMM."""

FORMS = {
    "x": (("fprop", "first"), ("wgrad", "second")),
    "w": (("fprop", "second"), ("dgrad", "second")),
    "dy": (("dgrad", "first"), ("wgrad", "first")),
}
"""Tensor → (GEMM, operand) of its row-wise form and of its column-wise form."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}
"""Names of dtypes in tables and legends."""


@dataclass(frozen=True, kw_only=True)
class Operands:
    """How the two operands of one GEMM are quantised; None: high precision.

    Args:
        first: spec of x (fprop) or dy (dgrad, wgrad).
        second: spec of w (fprop, dgrad) or x (wgrad).
    """

    first: QuantSpec | None = None
    second: QuantSpec | None = None

    @property
    def quantised(self) -> bool:
        return self.first is not None or self.second is not None

    def elements(self, dtype: str) -> str:
        """The element formats, with high precision shown as `dtype`: "E2M1·E2M1", "BF16·BF16"."""
        return "·".join(SHORT[dtype] if s is None else s.element.upper() for s in (self.first, self.second))


HIGH_PRECISION = Operands()


@dataclass(frozen=True, kw_only=True)
class Table(Mapping[str, Operands]):
    """The six operands: GEMM name → `Operands`. Tables are equal if they compute the same; names do not count.

    Args:
        dtype: dtype of activations and of unquantised GEMMs: "bfloat16", "float16" or "float32".
        name: name of the recipe, for messages.
    """

    fprop: Operands = HIGH_PRECISION
    dgrad: Operands = HIGH_PRECISION
    wgrad: Operands = HIGH_PRECISION
    dtype: str = "bfloat16"
    name: str = field(default="", compare=False)

    def __getitem__(self, gemm: str) -> Operands:
        if gemm not in GEMMS:
            raise KeyError(gemm)
        found: Operands = getattr(self, gemm)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(GEMMS)

    def __len__(self) -> int:
        return len(GEMMS)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether any operand is quantised."""
        return any(operands.quantised for operands in self.values())

    def specs(self) -> list[QuantSpec]:
        """The distinct quant specs."""
        found = [spec for operands in self.values() for spec in (operands.first, operands.second) if spec is not None]
        return list(dict.fromkeys(found))


class Shape(Protocol):
    """The properties of a layer that backends read: y [*, out_features] = x [*, in_features]·wᵀ."""

    @property
    def name(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


def describe(spec: QuantSpec | None, dtype: str = "bfloat16", *, along_tokens: bool = False) -> tuple[str, ...]:
    """(element, block, scale, rounding, Hadamard) of an operand, for tables."""
    if spec is None:
        return (SHORT[dtype], "-", "-", "-", "no")
    rows, columns = spec.block
    block = "tensor" if rows is None else "row" if columns is None else f"{rows}×{columns}"
    if along_tokens and columns is not None:
        block += " along tokens"
    scale = spec.scale.upper() if spec.scale != "pow2" else "FP32 2ᵏ"
    if spec.scale_rounding:
        scale += f" {spec.scale_rounding}"
    if spec.global_scale:
        scale += " + FP32 1×128" if spec.global_scale == "block" else f" + FP32 {spec.global_scale}"
    if spec.delayed:
        scale += " delayed"
    if spec.four_over_six:
        scale += f" 4/6 {spec.four_over_six}"
    hadamard = "no"
    if spec.hadamard is not None:
        # `signs` of a Rotation, which can replace the Hadamard transform, is its kind.
        words = {
            "fixed": "signed",
            "random": "random signs",
            "step": "signs per step",
            "none": "unsigned",
            "dct": "DCT",
            "orthogonal": "random rotation",
        }
        hadamard = f"{spec.hadamard.size}, {words[spec.hadamard.signs]}"
    return (spec.element.upper(), block, scale, spec.rounding, hadamard)
