"""Quartet II: NVFP4 in all three products, with unbiased gradients of half the usual error
(arXiv:2601.22813).
"""

from dataclasses import dataclass, replace

from fp4train.backends.table import Operands
from fp4train.precision.recipe import Recipe
from fp4train.quantize import Hadamard, QuantSpec
from fp4train.text import check_choice


@dataclass(frozen=True, kw_only=True)
class QuartetII(Recipe):
    """NVFP4 with four over six in the forward pass and MS-EDEN in the backward pass.

    Forward: 1×16 blocks for x and w, each scaled to 6 or to 4 by the squared error. Backward: x and
        w are taken as the
    forward pass rounded them, turned by a random Hadamard transform of 128 together with dy, and
    requantised by MS-EDEN (`quantize/rounding.py`), whose result is unbiased over the transforms of
    a layer, drawn anew in each step.

    The constants are those of the authors' kernels (github.com/IST-DASLab/Quartet-II). Not
    included: their amax of the step before, which saves a pass on a GPU; the amax here is the
    current one.

    Args:
        four_over_six: "mse", "mae", or "none" for plain NVFP4 in the forward pass.
        hadamard: size of the transform.
        backward_range: magnitude to which the largest element of a block is scaled in backward, as
            a share of 6. Some clipping lowers the error, and the correction accounts for it.
    """

    four_over_six: str = "mse"
    hadamard: int = 128
    backward_range: float = 1 / (17 / 16 * 0.93)

    def operands(self) -> dict[str, Operands]:
        check_choice("four_over_six", self.four_over_six, ("mse", "mae", "none"))
        forward = QuantSpec()
        if self.four_over_six != "none":
            forward = QuantSpec(four_over_six=self.four_over_six, global_bound=256)
        dy = QuantSpec(
            rounding="eden",
            global_bound=256,  # block scales have room for the correction
            guard=self.backward_range,
            hadamard=Hadamard(size=self.hadamard, signs="step"),
        )
        again = replace(dy, requantises=forward)
        return {
            "fprop": Operands(first=forward, second=forward),
            "dgrad": Operands(first=dy, second=again),
            "wgrad": Operands(first=dy, second=again),
        }
