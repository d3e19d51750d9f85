"""NVFP4 and its switches (arXiv:2509.25149)."""

from dataclasses import dataclass, replace

from fp4train.backends.table import Operands
from fp4train.precision.recipe import Recipe, check_kinds
from fp4train.quantize import Hadamard, QuantSpec
from fp4train.text import check_choice


@dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """NVFP4 pretraining: E2M1 elements, one E4M3 scale per 1×16 block, one FP32 scale per tensor.

    Four techniques preserve quality ("Pretraining Large Language Models with NVFP4",
    arXiv:2509.25149, section 4): some layers in high precision (`LayerPolicy`); a 16×16 Hadamard
    transform of the wgrad operands, which spreads outliers over the block; 2D 16×16 weight blocks,
    so that w and wᵀ dequantise to the same values in forward and backward; and stochastic rounding
    of gradients, whose rounding bias would otherwise accumulate.

    The options are those of TE's `NVFP4BlockScaling`:

    Args:
        hadamard: transform x and dy along tokens for wgrad (TE: not disable_rht).
        stochastic_rounding: stochastic rounding of dy in dgrad and wgrad (TE: not
            disable_stochastic_rounding).
        two_d_weights: 16×16 blocks for w, else 1×16 (TE: not disable_2d_quantization).
        row_scaled_activation: one global scale per token instead of per tensor for x in fprop, one
            per channel in wgrad.
        four_over_six: "none", "weights", "activations" or "all": scale the maximum of each block to
            6 or to 4, whichever has the smaller error (arXiv:2512.02010).
        four_over_six_error: "mae" or "mse", the error that is compared.
        four_over_six_bound: operands of four-over-six whose largest E4M3 block scale is 256 instead
            of 448: "none", "weights", "activations" or "all".
        formula: "te2.14", or "te2.13" for the block scale of TE ≤ 2.13.
        guard: share of E2M1's range that stochastically rounded blocks use. At 1 a block scale that
            E4M3 rounds down clips the block's maximum, which is a bias; 16/17 leaves room (Quartet
            II, arXiv:2601.22813).
    """

    hadamard: bool = True
    stochastic_rounding: bool = True
    two_d_weights: bool = True
    row_scaled_activation: bool = False
    four_over_six: str = "none"
    four_over_six_error: str = "mae"
    four_over_six_bound: str = "all"
    formula: str = "te2.14"
    guard: float = 1.0

    def __post_init__(self) -> None:
        scopes = ("none", "weights", "activations", "all")
        check_choice("four_over_six", self.four_over_six, scopes)
        check_choice("four_over_six_bound", self.four_over_six_bound, scopes)
        check_choice("four_over_six_error", self.four_over_six_error, ("mae", "mse"))
        check_kinds(self)
        if self.four_over_six in ("activations", "all") and self.hadamard:
            raise ValueError(
                f"four_over_six={self.four_over_six!r} with hadamard=True: choose hadamard=false "
                "or four_over_six=weights"
            )
        if self.guard != 1.0 and not self.stochastic_rounding:
            raise ValueError(
                f"guard={self.guard} with stochastic_rounding=False: guard needs stochastic "
                "rounding"
            )
        super().__post_init__()

    def _base(self, scope: str) -> QuantSpec:
        spec = QuantSpec(formula=self.formula)
        if self.four_over_six in (scope, "all"):
            if self.four_over_six_bound in (scope, "all"):
                bound = 256.0
            else:
                bound = 448.0
            spec = replace(spec, four_over_six=self.four_over_six_error, global_bound=bound)
        return spec

    def operands(self) -> dict[str, Operands]:
        activation = self._base("activations")
        weight = self._base("weights")
        x = replace(activation, global_scale="row" if self.row_scaled_activation else "tensor")
        if self.two_d_weights:
            w = replace(weight, block=(16, 16))
        else:
            w = weight
        transform = Hadamard() if self.hadamard else None
        # Four-over-six compares two nearest roundings, so stochastic gradients keep the plain
        # scale, as in TE.
        stochastic = QuantSpec(formula=self.formula, rounding="stochastic", guard=self.guard)
        if self.stochastic_rounding:
            dy = stochastic
        else:
            dy = activation
        return {
            "fprop": Operands(first=x, second=w),
            "dgrad": Operands(first=dy, second=w),
            "wgrad": Operands(
                first=replace(dy, hadamard=transform),
                second=replace(x, hadamard=transform),
            ),
        }
