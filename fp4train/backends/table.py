"""The table of a linear layer: how each operand of its three GEMMs is quantised. Recipes define it,
backends run it.

A linear layer y = x·wᵀ computes three products in training, each with two operands that are blocked
along the contraction axis:

    fprop   y  = x·wᵀ     x [M, K],   w [N, K]      blocked along K (in features)
    dgrad   dx = dy·w     dy [M, N],  wᵀ [K, N]     blocked along N (out features)
    wgrad   dw = dyᵀ·x    dyᵀ [N, M], xᵀ [K, M]     blocked along M (tokens)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from fp4train.formats import BF16, FP16, FP32, ElementFormat
from fp4train.quantize import Hadamard, Operand, QuantSpec, ValuesOf
from fp4train.quantize.outer import describe_global
from fp4train.quantize.source import CONTRACTED, operand
from fp4train.text import check_choice

ACCUMULATORS = ("auto", "fast", "exact")
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""Names of the first and second operand of each GEMM."""

FORMS = {
    "x": (("fprop", "first"), ("wgrad", "second")),
    "w": (("fprop", "second"), ("dgrad", "second")),
    "dy": (("dgrad", "first"), ("wgrad", "first")),
}
"""Tensor → (GEMM, operand) of its row-wise form and of its column-wise form."""

HIGH_FORMATS = {"bfloat16": BF16, "float16": FP16, "float32": FP32}
"""The formats of operands in high precision, by the dtype that a recipe names."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT = {dtype: fmt.name.upper() for dtype, fmt in HIGH_FORMATS.items()}
"""Names of dtypes in tables and legends."""


@dataclass(frozen=True, kw_only=True)
class Operands:
    """How the two operands of one GEMM are quantised; None: high precision.

    Args:
        first: spec of x (fprop) or dy (dgrad, wgrad).
        second: spec of w (fprop, dgrad) or x (wgrad).
        accumulator: the precision in which tensor cores of compute capability 8.9 and 9.0 sum FP8
            codes with one scale per tensor or row: "fast", 14 bits; "exact", whose partial sums of
            128 products are added in float32; "auto": what the backend does by itself, Transformer
            Engine "fast" in fprop, all others "exact". Other products have one.
        dequantised: a flag of dgrad and wgrad: whether the second operand is the values of the codes that
            fprop multiplies, in high precision; `second` is None then.
    """

    first: QuantSpec | None = None
    second: QuantSpec | None = None
    accumulator: str = "auto"
    dequantised: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dequantised, bool):
            raise TypeError(f"dequantised={self.dequantised!r} must be True or False")
        if self.dequantised and self.second is not None:
            raise ValueError(
                "dequantised=True: the second operand is the values of the codes that fprop "
                f"multiplies, so second={self.second} would quantise nothing: leave second=None"
            )
        check_choice("accumulator", self.accumulator, ACCUMULATORS)
        if self.accumulator != "auto" and not self.sums_fp8:
            raise ValueError(
                f"accumulator={self.accumulator!r} is for products of two FP8 operands with "
                "one scale per tensor or "
                "row; others are summed in one way: use accumulator='auto'"
            )

    @property
    def sums_fp8(self) -> bool:
        """Whether both are FP8 with one scale per tensor or row, of which some tensor cores have
        two kinds of sums.
        """
        return all(
            spec is not None and spec.format.rate == "FP8" and spec.block[1] is None
            for spec in (self.first, self.second)
        )

    @property
    def both(self) -> tuple[QuantSpec | None, QuantSpec | None]:
        return self.first, self.second

    @property
    def quantised(self) -> bool:
        return self.first is not None or self.second is not None

    @property
    def why_derived(self) -> str | None:
        """What the second operand is, where it is the values of codes that fprop multiplies; None:
        its spec says what it is.
        """
        return "values of the codes that fprop multiplies" if self.dequantised else None

    @property
    def without_codes_of_fprop(self) -> "Operands":
        """The same where fprop has no codes: the second operand is the tensor."""
        return replace(self, dequantised=False)

    def formats(self, dtype: str) -> tuple[ElementFormat, ElementFormat]:
        """The formats of both; `dtype` in high precision."""
        high = HIGH_FORMATS[dtype]
        return (
            high if self.first is None else self.first.format,
            high if self.second is None else self.second.format,
        )

    def elements(self, dtype: str) -> str:
        """The names of their formats, with high precision shown as `dtype`: "E2M1·E2M1",
        "BF16·BF16".
        """
        first, second = self.formats(dtype)
        return f"{first.name.upper()}·{second.name.upper()}"


HIGH_PRECISION = Operands()


@dataclass(frozen=True, kw_only=True)
class Table(Mapping[str, Operands]):
    """The six operands: GEMM name → `Operands`. Tables are equal if they compute the same; names do
    not count.

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
        operands: Operands = getattr(self, gemm)
        return operands

    def __iter__(self) -> Iterator[str]:
        return iter(GEMMS)

    def __len__(self) -> int:
        return len(GEMMS)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def quantised(self) -> bool:
        """Whether any operand is quantised."""
        return any(operands.quantised for operands in self.values())

    def specs(self) -> list[QuantSpec]:
        """The distinct quant specs."""
        return list(dict.fromkeys(spec for *_, spec in named(self) if spec is not None))


def named(table: Mapping[str, Operands]) -> list[tuple[str, str, QuantSpec | None]]:
    """(GEMM, operand, spec) of each operand of some GEMMs: ("fprop", "x", …)."""
    return [
        (gemm, name, spec)
        for gemm, operands in table.items()
        for name, spec in zip(OPERANDS[gemm], operands.both, strict=True)
    ]


def sourced(table: Mapping[str, Operands]) -> dict[tuple[str, str], Operand]:
    """(GEMM, tensor) → the operand, with where it comes from, of the GEMMs of a layer."""
    operands = {(gemm, tensor): operand(tensor, gemm, spec) for gemm, tensor, spec in named(table)}
    for gemm, pair in table.items():
        if pair.why_derived is not None:
            tensor = OPERANDS[gemm][1]
            codes = operands["fprop", tensor].codes
            assert codes is not None  # a recipe checks it
            operands[gemm, tensor] = Operand(tensor, ValuesOf(codes, CONTRACTED[gemm]))
    return operands


def check_dequantised(recipe: str, operands: dict[str, Operands]) -> None:
    """Raises ValueError where an operand is to be the values of codes that fprop has not, or has
    of a transformed tensor.
    """
    for gemm, pair in operands.items():
        if pair.why_derived is None:
            continue
        instead = "use dequantised=False there"
        if gemm == "fprop":
            raise ValueError(
                f"{recipe}: fprop: dequantised=True is for dgrad and wgrad, which take the values "
                f"of the codes that fprop multiplies: {instead}"
            )
        tensor = OPERANDS[gemm][1]
        codes = operands["fprop"].both[OPERANDS["fprop"].index(tensor)]
        if codes is None:
            raise ValueError(
                f"{recipe}: {tensor} of {gemm}: dequantised=True takes the values of the codes "
                f"that fprop multiplies, and fprop does not quantise {tensor}: {instead}"
            )
        if codes.hadamard is not None:
            raise ValueError(
                f"{recipe}: {tensor} of {gemm}: dequantised=True takes the values of the codes "
                f"that fprop multiplies, which are those of a transformed {tensor} (hadamard="
                f"{codes.hadamard}): use hadamard=None in fprop, or backward='quantised'"
            )


class Shape(Protocol):
    """The properties of a layer that backends read: y [*, out_features] = x [*, in_features]·wᵀ,
    with one weight or, of `experts`, with so many, each for the rows routed to it.
    """

    @property
    def name(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def experts(self) -> int: ...


def describe_operand(operand: Operand, dtype: str = "bfloat16") -> tuple[str, ...]:
    """`describe` of an operand of a GEMM: "BF16 of E2M1" is values of codes, in high precision."""
    codes = operand.codes
    if codes is None:
        return describe(None, dtype)
    element, *words = describe(codes.spec, dtype, along_tokens=codes.axis == "tokens")
    if operand.spec is None:
        element = f"{SHORT[dtype]} of {element}"
    return (element, *words)


def describe(
    spec: QuantSpec | None, dtype: str = "bfloat16", *, along_tokens: bool = False
) -> tuple[str, ...]:
    """(element, block, scale, rounding, Hadamard) of an operand, for tables."""
    if spec is None:
        return (SHORT[dtype], "-", "-", "-", "no")
    rows, columns = spec.block
    block = f"{rows}×{columns}"
    if columns is None:
        block = "tensor" if rows is None else "row"
    if along_tokens and columns is not None:
        block += " along tokens"
    powers_of_two = spec.scale_format.mantissa_bits == 0
    if powers_of_two and not spec.scale_format.is_byte:
        scale = "FP32 2ᵏ"
    else:
        scale = spec.scale.upper()
    if spec.scale_rounding:
        scale += f" {spec.scale_rounding}"
    if spec.global_scale:
        scale += f" + {describe_global(spec.global_scale)}"
    if spec.chunks:
        scale += " in {}×{}".format(*spec.chunks)
    if spec.delayed:
        scale += " delayed"
    if spec.held:
        scale += f" held {spec.held} steps"
    if spec.four_over_six:
        scale += f" 4/6 {spec.four_over_six}"
    hadamard = "no"
    if isinstance(spec.hadamard, Hadamard):
        words = {
            "fixed": "signed",
            "random": "random signs",
            "step": "signs per step",
            "none": "unsigned",
        }
        hadamard = f"{spec.hadamard.size}, {words[spec.hadamard.signs]}"
    elif spec.hadamard is not None:
        hadamard = f"{spec.hadamard.size}, {spec.hadamard.label}"
    return (spec.element.upper(), block, scale, spec.rounding, hadamard)
