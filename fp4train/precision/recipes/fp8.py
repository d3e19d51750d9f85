"""FP8 with float32 scales per tensor, row or block, from the current amax or from earlier steps."""

from dataclasses import dataclass, replace

from fp4train.backends.table import Operands
from fp4train.precision.recipe import Recipe, by_tensor
from fp4train.quantize import Delayed, QuantSpec
from fp4train.text import check_choice


def _fp8(element: str, block: tuple[int | None, int | None], scale: str = "fp32") -> QuantSpec:
    return QuantSpec(element=element, block=block, scale=scale, global_scale=None)


def _summed(operands: dict[str, Operands], accumulator: str) -> dict[str, Operands]:
    """`operands` with the accumulator of fprop."""
    return operands | {"fprop": replace(operands["fprop"], accumulator=accumulator)}


@dataclass(frozen=True, kw_only=True)
class FP8Current(Recipe):
    """FP8 with one scale per tensor, from its current amax (TE: Float8CurrentScaling).

    Args:
        element: "hybrid" (E5M2 gradients) or "e4m3".
        power_of_two: round scales down to powers of two.
        accumulator: accumulation in fprop, on compute capability 8.9 and 9.0: "fast", "exact" or
            "auto" (`Operands.accumulator`).
    """

    element: str = "hybrid"
    power_of_two: bool = False
    accumulator: str = "auto"

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("hybrid", "e4m3"))
        scale = "pow2" if self.power_of_two else "fp32"
        x = _fp8("e4m3", (None, None), scale)
        dy = _fp8("e5m2" if self.element == "hybrid" else "e4m3", (None, None), scale)
        return _summed(by_tensor(x, x, dy), self.accumulator)


@dataclass(frozen=True, kw_only=True)
class FP8Delayed(Recipe):
    """FP8 with one scale per tensor, from the amax of earlier steps (TE: DelayedScaling;
    arXiv:2209.05433).

    The scale is known in advance, which saves a pass over the tensor. Values that grow suddenly
    saturate for one step.

    Args:
        element: "hybrid" (E5M2 gradients) or "e4m3".
        history: length of the amax history, in steps.
        algorithm: "max" of the history, or its "most_recent" entry.
        margin: headroom above amax, in powers of two.
        accumulator: see `FP8Current`.
    """

    element: str = "hybrid"
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    accumulator: str = "auto"

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("hybrid", "e4m3"))
        delayed = Delayed(history=self.history, algorithm=self.algorithm, margin=self.margin)
        x = replace(_fp8("e4m3", (None, None)), delayed=delayed)
        dy = replace(x, element="e5m2" if self.element == "hybrid" else "e4m3")
        return _summed(by_tensor(x, x, dy), self.accumulator)


@dataclass(frozen=True, kw_only=True)
class FP8Row(Recipe):
    """FP8 with one scale per row of an operand (row-wise scaling of `torch._scaled_mm`), E4M3
    everywhere.
    """

    def operands(self) -> dict[str, Operands]:
        return by_tensor(*[_fp8("e4m3", (1, None))] * 3)


@dataclass(frozen=True, kw_only=True)
class FP8Block(Recipe):
    """FP8 with 1×128 blocks for x and dy and 128×128 blocks for w (DeepSeek-V3, arXiv:2412.19437,
    section 3.3).

    Args:
        element: "e4m3" or "hybrid" (E5M2 gradients).
        power_of_two: scales are powers of two (TE's default) instead of arbitrary FP32 values.
    """

    element: str = "e4m3"
    power_of_two: bool = True

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("e4m3", "hybrid"))
        scale = "pow2" if self.power_of_two else "fp32"
        dy = _fp8("e5m2" if self.element == "hybrid" else "e4m3", (1, 128), scale)
        return by_tensor(_fp8("e4m3", (1, 128), scale), _fp8("e4m3", (128, 128), scale), dy)
