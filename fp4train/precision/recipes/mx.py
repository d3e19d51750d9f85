"""OCP Microscaling formats: MXFP8, MXFP6, MXFP4 (OCP MX v1.0)."""

from dataclasses import dataclass, replace

from fp4train.backends.table import Operands
from fp4train.precision.recipe import Recipe, by_tensor
from fp4train.quantize import Hadamard, QuantSpec
from fp4train.text import check_choice


def _mx(element: str, rounding: str, block: tuple[int, int] = (1, 32)) -> QuantSpec:
    return QuantSpec(
        element=element, block=block, scale="e8m0", scale_rounding=rounding, global_scale=None
    )


@dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """OCP MX: E4M3 elements, one power-of-two E8M0 scale per 1×32 block.

    E4M3 everywhere and scales rounded up ("Recipes for Pre-training LLMs with MXFP8",
    arXiv:2506.08027). Rounding up cannot saturate; the floor of the OCP specification clips the
    largest values in a quarter of the blocks.

    Args:
        element: "e4m3", or "hybrid" for E5M2 gradients.
        scale_rounding: "rceil", "floor", "even" or "ceil".
        two_d_weights: 32×32 blocks for w (TE: enable_2d_quantization).
    """

    element: str = "e4m3"
    scale_rounding: str = "rceil"
    two_d_weights: bool = False

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("e4m3", "hybrid"))
        x = _mx("e4m3", self.scale_rounding)
        if self.two_d_weights:
            w = _mx("e4m3", self.scale_rounding, (32, 32))
        else:
            w = x
        return by_tensor(
            x, w, _mx("e5m2" if self.element == "hybrid" else "e4m3", self.scale_rounding)
        )


@dataclass(frozen=True, kw_only=True)
class MXFP6(Recipe):
    """OCP MX with 6-bit elements: E2M3 (more mantissa; the default for weights and activations) or
    E3M2.

    Args:
        element: format of x and w; `gradient_element`: format of dy, where range matters more.
        scale_rounding: "rceil", "floor", "even" or "ceil".
    """

    element: str = "e2m3"
    gradient_element: str = "e3m2"
    scale_rounding: str = "rceil"

    def operands(self) -> dict[str, Operands]:
        for name in ("element", "gradient_element"):
            check_choice(name, getattr(self, name), ("e2m3", "e3m2"))
        x = _mx(self.element, self.scale_rounding)
        return by_tensor(x, x, _mx(self.gradient_element, self.scale_rounding))


@dataclass(frozen=True, kw_only=True)
class MXFP4(Recipe):
    """OCP MX with E2M1 elements: the elements of NVFP4 in larger blocks (32) with power-of-two
    scales.

    Gradients are rounded stochastically, with scales rounded up so that nothing clips. Both
    operands of wgrad are turned by a Hadamard transform of 32 with fixed signs; x is rounded to
    nearest. "Training LLMs with MXFP4" (arXiv:2502.20586), where the idea is from, turns both
    operands of dgrad and wgrad in groups of 64 with signs drawn anew, and rounds both
    stochastically, scaled by 3/4 so that nothing clips.
    """

    scale_rounding: str = "even"
    stochastic_rounding: bool = True
    hadamard: bool = True

    def operands(self) -> dict[str, Operands]:
        x = _mx("e2m1", self.scale_rounding)
        # A scale rounded down clips the block's maximum, which biases stochastic rounding: round it
        # up for gradients.
        if self.stochastic_rounding:
            dy = replace(_mx("e2m1", "rceil"), rounding="stochastic")
        else:
            dy = x
        transform = Hadamard(size=32) if self.hadamard else None
        return {
            "fprop": Operands(first=x, second=x),
            "dgrad": Operands(first=dy, second=x),
            "wgrad": Operands(
                first=replace(dy, hadamard=transform), second=replace(x, hadamard=transform)
            ),
        }
