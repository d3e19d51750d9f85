"""Operands of two terms: what a recipe adds to the codes of an operand, and what it refuses.

    centred     x = 1·μᵀ + (x − 1·μᵀ)       μ: the mean over tokens; the rest is quantised
    residual    x ≈ v(q(x)) + v(r(x − v(q(x))))     the rest that codes leave is quantised again

`nn/executors/terms.py` multiplies them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp4train.backends.table import SHORT, Operands
from fp4train.quantize import Operand, QuantSpec

CENTRED = ("x", "dy")
"""Tensors that have tokens, whose mean can be taken out."""
RESIDUAL = ("x", "w")
"""Operands of fprop."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What the codes of fprop's operands leave of them, as a second term:

        y = q(x)·q(w)ᵀ + Δx[:, I]·q(w)[:, I]ᵀ + q(x)[:, I]·Δw[:, I]ᵀ      Δx = x − v(q(x))

    The error is then −Δx·Δwᵀ on the channels I, and that of Δ's own codes. I are the in features
    with the largest mean |Δx| over tokens plus mean |Δw| over out features, of each call anew
    (Hot-Channel Patch, arXiv:2602.02047, which keeps them for a period). dgrad and wgrad take the
    operands of the recipe.

    Args:
        tensors: names of operands, of "x" and "w".
        spec: how the residuals are quantised, to nearest; None: high precision.
        share: share of the in features, rounded up; 1.0: all.
    """

    tensors: tuple[str, ...] = ("x",)
    spec: QuantSpec | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", chosen("residual.tensors", self.tensors, RESIDUAL))
        if not self.tensors:
            raise ValueError("residual.tensors=(): name x, w or both, or use residual=None")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise TypeError(f"residual.share={self.share!r} must be a number")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"residual.share={self.share} must lie above 0 and up to 1: it is a share of the "
                "in features"
            )
        if self.spec is None:
            return
        if not isinstance(self.spec, QuantSpec):
            raise TypeError(f"residual.spec={self.spec!r} must be a QuantSpec, or None")
        spec = self.spec
        if spec.random or spec.earlier_amax or spec.hadamard or spec.requantises:
            raise ValueError(
                f"residual.spec={spec}: allowed is rounding='nearest' without a transform, "
                "requantises, delayed scaling or a held amax"
            )

    def count(self, in_features: int) -> int:
        """The number of in features that have a second term: at least one."""
        return max(1, math.ceil(self.share * in_features - 1e-9))

    def elements(self, dtype: str) -> str:
        """The format of the second term, for tables: "E2M1", "BF16 of 10%"."""
        element = SHORT[dtype] if self.spec is None else self.spec.element.upper()
        if self.share == 1:
            return element
        return f"{element} of {100 * self.share:.3g}%"


def chosen(field: str, names: Sequence[str] | str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The tensors that a field names, in the order of `allowed`.

    Raises:
        ValueError: it names another.
    """
    if isinstance(names, str):
        names = (names,)
    for name in names:
        if name not in allowed:
            raise ValueError(f"{field}: {name!r} is none of {', '.join(allowed)}")
    return tuple(name for name in allowed if name in names)


def check_centred(recipe: str, centred: Sequence[str], operands: Mapping[str, Operands]) -> None:
    """ValueError where the mean of a tensor cannot be taken out."""
    for tensor in centred:
        row_wise, column = {"x": ("fprop", "wgrad"), "dy": ("dgrad", "wgrad")}[tensor]
        rows = operands[row_wise].first
        columns = operands[column].second if tensor == "x" else operands[column].first
        remaining = [name for name in centred if name != tensor]
        instead = f"use recipe.centred=[{','.join(remaining)}]"
        if rows is None and columns is None:
            raise ValueError(
                f"centred: {recipe} quantises {tensor} in no GEMM, so its mean takes no range "
                f"from the rest: {instead}"
            )
        if rows is not None and rows.hadamard is not None:
            raise ValueError(
                f"centred: {row_wise}, {tensor}: hadamard={rows.hadamard}: the mean is multiplied "
                f"by the weight that {row_wise} multiplies, which is a transformed one: use "
                f"hadamard=None in {row_wise}, or {instead}"
            )


def check_residual(
    recipe: str, residual: Residual | None, operands: Mapping[str, Operands], backward: str
) -> None:
    """TypeError or ValueError where operands of fprop can have no second term."""
    if residual is None:
        return
    if not isinstance(residual, Residual):
        raise TypeError(f"residual={residual!r} must be a Residual, or None")
    instead = "use recipe.residual=null"
    specs = {"x": operands["fprop"].first, "w": operands["fprop"].second}
    for tensor in residual.tensors:
        spec = specs[tensor]
        if spec is None:
            raise ValueError(
                f"residual: {recipe} does not quantise {tensor} in fprop, so its codes leave "
                f"nothing: {instead}"
            )
        if spec.hadamard is not None:
            raise ValueError(
                f"residual: fprop, {tensor}: hadamard={spec.hadamard}: its codes are those of a "
                f"transformed {tensor}: use hadamard=None in fprop, or {instead}"
            )
    dequantised = [gemm for gemm, pair in operands.items() if pair.why_derived is not None]
    if backward != "quantised" or dequantised:
        quantised = "backward='quantised'"
        if backward == "quantised":
            quantised = f"dequantised=false in {' and '.join(dequantised)}"
        raise ValueError(
            f"residual: {recipe} has a dequantised backward, which takes the values of one set of "
            f"codes, and the operand is two: use {quantised}, or {instead}"
        )


@dataclass(frozen=True)
class Terms:
    """The second terms of a recipe's operands: its fields `centred` and `residual`."""

    centred: tuple[str, ...]
    residual: Residual | None

    def __bool__(self) -> bool:
        return bool(self.centred) or self.residual is not None

    @property
    def instead(self) -> str:
        """The options that run without them."""
        options = ["recipe.centred=[]"] if self.centred else []
        if self.residual is not None:
            options.append("recipe.residual=null")
        return " ".join(options)

    def why_emulated(self, dtype: str) -> str | None:
        """Why only emulation and the reference multiply them, named as in `words`; None: there are
        none.
        """
        if not self:
            return None
        return (
            f"an operand of two terms ({', '.join(self.words(dtype))}) is a sum of products, which "
            f"emulate and reference make ({self.instead} runs without)"
        )

    def check_apart(self, where: str) -> None:
        """ValueError if there are any; `where`: what multiplies parts of a layer apart."""
        if self:
            raise ValueError(
                f"{where}: operands of two terms belong to all channels and GEMMs of a layer: use "
                f"{self.instead} there"
            )

    def check_layer(self, recipe: str, layer: str, key: str | None) -> None:
        """ValueError where ranks share the tokens or features of a layer, whose means and residuals
        are those of all.

        Args:
            key: name in `parallel` of these ranks; None: there are none.
        """
        if self and key is not None:
            raise ValueError(
                f"{recipe} has operands of two terms, made of all tokens and features of a layer, "
                f"and parallel.{key} cuts {layer}: use parallel.{key}=1, or {self.instead}"
            )

    def words(self, dtype: str) -> list[str]:
        """What the name of a recipe says of them."""
        words = [f"{' and '.join(self.centred)} centred"] if self.centred else []
        if self.residual is not None:
            tensors = " and ".join(self.residual.tensors)
            words.append(f"residual of {tensors} in {self.residual.elements(dtype)}")
        return words

    def of(self, gemm: str, operand: Operand, dtype: str) -> str:
        """The second term of an operand, as it follows its element in a table."""
        if operand.codes is None:
            return ""
        words = ""
        if gemm == "fprop" and self.residual and operand.tensor in self.residual.tensors:
            words = f" + {self.residual.elements(dtype)}"
        return f"{words}, centred" if operand.tensor in self.centred else words
