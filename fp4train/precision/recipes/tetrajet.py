"""TetraJet-v2: NVFP4 with double-block scales, and gradients of what the forward pass multiplied
(arXiv:2510.27527).
"""

from dataclasses import dataclass, replace

from fp4train.backends.table import Operands
from fp4train.precision.recipe import Recipe
from fp4train.quantize import Hadamard, QuantSpec


@dataclass(frozen=True, kw_only=True)
class TetraJetV2(Recipe):
    """NVFP4 in all six operands, each with E4M3 scales per 1×16 and a float32 scale per 1×128
    instead of per tensor.

    Forward: x and w to nearest. Backward: "aligned" x and w, that is, the values that the forward
        pass multiplied, and
    dy, all turned by a random Hadamard transform of 16 and rounded stochastically, x and w anew.

    OsciReset, which works on the weights between steps, is `optim.oscillation`. OutControl is the
    random transform and `outliers=OutlierChannels(recipe=TetraJetV2Outliers())`.

    A block whose scale over that per 1×128 is 2⁻¹⁰ or less becomes zero, as in the authors' CUDA
    kernels (github.com/thu-ml/TetraJet-v2-NVFP4Training); their simulation of stochastic rounding
    gives it the smallest scale.

    Args:
        aligned: backward takes x and w as the forward pass rounded them; False: as they were
            before.
        hadamard: size of the transform.
        guard: share of E2M1's range that stochastically rounded blocks use. 1 is the authors'
            kernels, where an E4M3 scale that is rounded down clips the block's maximum, a bias;
            16/17 leaves room for it.
    """

    aligned: bool = True
    hadamard: int = 16
    guard: float = 1.0

    def operands(self) -> dict[str, Operands]:
        forward = QuantSpec(global_scale="block")
        dy = replace(
            forward,
            rounding="stochastic",
            guard=self.guard,
            hadamard=Hadamard(size=self.hadamard, signs="step"),
        )
        if self.aligned:
            again = replace(dy, requantises=forward)
        else:
            again = dy
        return {
            "fprop": Operands(first=forward, second=forward),
            "dgrad": Operands(first=dy, second=again),
            "wgrad": Operands(first=dy, second=again),
        }


@dataclass(frozen=True, kw_only=True)
class TetraJetV2Outliers(Recipe):
    """The operands of TetraJet-v2's outlier channels: MXFP8 in fprop and wgrad, NVFP4 in dgrad.

    fprop and wgrad are rounded to nearest: E4M3 with an E8M0 scale, rounded up, per 1×32. wgrad
        takes x as fprop
    rounded it. dgrad, in which channels are the rows of wᵀ, is that of `TetraJetV2`, of w as fprop
    rounded it.

    Args:
        aligned, hadamard, guard: see `TetraJetV2`.
    """

    aligned: bool = True
    hadamard: int = 16
    guard: float = 1.0

    def operands(self) -> dict[str, Operands]:
        forward = QuantSpec(
            element="e4m3", block=(1, 32), scale="e8m0", scale_rounding="rceil", global_scale=None
        )
        dense_operands = TetraJetV2(hadamard=self.hadamard, guard=self.guard).operands()
        dy = dense_operands["dgrad"].first
        assert dy is not None
        return {
            "fprop": Operands(first=forward, second=forward),
            "dgrad": Operands(
                first=dy, second=replace(dy, requantises=forward) if self.aligned else dy
            ),
            "wgrad": Operands(
                first=forward,
                second=replace(forward, requantises=forward) if self.aligned else forward,
            ),
        }
