"""The recipes of the field, each a dataclass whose fields are the switches of its paper or of Transformer Engine.

`print(NVFP4())` shows the table of six operands that a recipe stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fp4train.precision.recipe import GEMMS, HIGH_PRECISION, LossScaling, Operands, Recipe
from fp4train.quantize import Delayed, Hadamard, QuantSpec
from fp4train.words import check_choice


def _by_tensor(x: QuantSpec | None, w: QuantSpec | None, dy: QuantSpec | None) -> dict[str, Operands]:
    """The table of a recipe that treats x, w and dy alike wherever they appear."""
    return {
        "fprop": Operands(first=x, second=w),
        "dgrad": Operands(first=dy, second=w),
        "wgrad": Operands(first=dy, second=x),
    }


@dataclass(frozen=True, kw_only=True)
class BF16(Recipe):
    """All three GEMMs in BF16: the baseline that every other recipe is measured against."""


@dataclass(frozen=True, kw_only=True)
class FP32(Recipe):
    """Everything in float32: the reference for numerics, about half the speed of BF16 on a CPU."""

    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class FP16(Recipe):
    """GEMMs and activations in IEEE half precision with dynamic loss scaling (Micikevicius et al. 2018).

    FP16 has 40 binades where gradients of a large model span more, hence the loss scale; `scaling` holds its constants.
    """

    dtype: str = "float16"
    scaling: LossScaling = field(default_factory=LossScaling)

    @property
    def loss_scaling(self) -> LossScaling | None:
        return self.scaling


@dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """NVFP4 pretraining: E2M1 elements, an E4M3 scale for each 1×16 block, one FP32 scale a tensor.

    Four techniques make it train ("Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4): some
    layers in high precision (`LayerPolicy`), a 16×16 Hadamard transform of the wgrad operands, which spreads outliers
    over the block; 2D 16×16 weight blocks, so that w and wᵀ dequantise to the same values in forward and backward;
    and stochastic rounding of gradients, whose rounding bias would otherwise accumulate.

    The switches are those of TE's `NVFP4BlockScaling`:

    Args:
        hadamard: transform x and dy along tokens for wgrad (TE: not disable_rht).
        stochastic_rounding: of dy in dgrad and wgrad (TE: not disable_stochastic_rounding).
        two_d_weights: 16×16 blocks for w, else 1×16 (TE: not disable_2d_quantization).
        row_scaled_activation: one global scale for each token instead of each tensor, for x in fprop.
        four_over_six: "none", "weights", "activations" or "all": choose for each block the better of mapping its
            maximum to 6 or to 4 (arXiv:2512.02010).
        four_over_six_error: "mae" or "mse", the error that decides.
        four_over_six_bound: operands of four-over-six whose global scale leaves the E4M3 block scale the room of 256
            instead of 448: "none", "weights", "activations" or "all".
        formula: "te2.14", or "te2.13" for the block scale that older TE computes.
        guard: share of E2M1's range that the scales of stochastically rounded blocks aim at. At 1 a block scale that
            E4M3 rounds down clips the block's maximum, a bias; 16/17 leaves room (Quartet II, arXiv:2601.22813).
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
        if self.four_over_six in ("activations", "all") and self.hadamard:
            raise ValueError(
                f"four_over_six={self.four_over_six!r} with hadamard=True: choose hadamard=false "
                "or four_over_six=weights"
            )
        if self.guard != 1.0 and not self.stochastic_rounding:
            raise ValueError(
                f"guard={self.guard} with stochastic_rounding=False: nothing is rounded that it would guard"
            )
        super().__post_init__()

    def _base(self, scope: str) -> QuantSpec:
        spec = QuantSpec(formula=self.formula)
        if self.four_over_six in (scope, "all"):
            bound = 256.0 if self.four_over_six_bound in (scope, "all") else 448.0
            spec = replace(spec, four_over_six=self.four_over_six_error, global_bound=bound)
        return spec

    def operands(self) -> dict[str, Operands]:
        activation, weight = self._base("activations"), self._base("weights")
        x = replace(activation, global_scale="row" if self.row_scaled_activation else "tensor")
        w = replace(weight, block=(16, 16)) if self.two_d_weights else weight
        transform = Hadamard() if self.hadamard else None
        # Four-over-six compares two nearest roundings, so a stochastic gradient keeps the plain scale, as in TE.
        stochastic = QuantSpec(formula=self.formula, rounding="stochastic", guard=self.guard)
        dy = stochastic if self.stochastic_rounding else activation
        return {
            "fprop": Operands(first=x, second=w),
            "dgrad": Operands(first=dy, second=w),
            "wgrad": Operands(first=replace(dy, hadamard=transform), second=replace(activation, hadamard=transform)),
        }


def _mx(element: str, rounding: str, block: tuple[int, int] = (1, 32)) -> QuantSpec:
    return QuantSpec(element=element, block=block, scale="e8m0", scale_rounding=rounding, global_scale=None)


@dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """OCP MX: E4M3 elements, a power-of-two E8M0 scale for each 1×32 block.

    E4M3 everywhere and scales rounded up ("Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027): rounding up
    cannot saturate, where the floor of the OCP text loses the top of a quarter of the blocks.

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
        w = _mx("e4m3", self.scale_rounding, (32, 32)) if self.two_d_weights else x
        return _by_tensor(x, w, _mx("e5m2" if self.element == "hybrid" else "e4m3", self.scale_rounding))


@dataclass(frozen=True, kw_only=True)
class MXFP6(Recipe):
    """OCP MX with 6-bit elements: E2M3 (more mantissa; the default for weights and activations) or E3M2.

    Args:
        element: of x and w; `gradient_element`: of dy, where range matters more.
        scale_rounding: "rceil", "floor", "even" or "ceil".
    """

    element: str = "e2m3"
    gradient_element: str = "e3m2"
    scale_rounding: str = "rceil"

    def operands(self) -> dict[str, Operands]:
        for name in ("element", "gradient_element"):
            check_choice(name, getattr(self, name), ("e2m3", "e3m2"))
        x = _mx(self.element, self.scale_rounding)
        return _by_tensor(x, x, _mx(self.gradient_element, self.scale_rounding))


@dataclass(frozen=True, kw_only=True)
class MXFP4(Recipe):
    """OCP MX with E2M1 elements: NVFP4's elements under coarser blocks (32) and power-of-two scales.

    Gradients are rounded stochastically and transformed as "Training LLMs with MXFP4" (arXiv:2502.20586) does.
    """

    scale_rounding: str = "even"
    stochastic_rounding: bool = True
    hadamard: bool = True

    def operands(self) -> dict[str, Operands]:
        x = _mx("e2m1", self.scale_rounding)
        # A scale that is rounded down clips the block's maximum, which biases stochastic rounding: round it up there.
        dy = replace(_mx("e2m1", "rceil"), rounding="stochastic") if self.stochastic_rounding else x
        transform = Hadamard(size=32) if self.hadamard else None
        return {
            "fprop": Operands(first=x, second=x),
            "dgrad": Operands(first=dy, second=x),
            "wgrad": Operands(first=replace(dy, hadamard=transform), second=replace(x, hadamard=transform)),
        }


def _fp8(element: str, block: tuple[int | None, int | None], scale: str = "fp32") -> QuantSpec:
    return QuantSpec(element=element, block=block, scale=scale, global_scale=None)


@dataclass(frozen=True, kw_only=True)
class FP8Current(Recipe):
    """FP8 with one scale a tensor, from the tensor at hand (TE: Float8CurrentScaling).

    Args:
        element: "hybrid" (E5M2 gradients) or "e4m3".
        power_of_two: round scales down to powers of two.
    """

    element: str = "hybrid"
    power_of_two: bool = False

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("hybrid", "e4m3"))
        scale = "pow2" if self.power_of_two else "fp32"
        x = _fp8("e4m3", (None, None), scale)
        return _by_tensor(x, x, _fp8("e5m2" if self.element == "hybrid" else "e4m3", (None, None), scale))


@dataclass(frozen=True, kw_only=True)
class FP8Delayed(Recipe):
    """FP8 with one scale a tensor, from the amax of earlier steps (TE: DelayedScaling; arXiv:2209.05433).

    The scale is known before the tensor is, which saves a pass over it; a sudden growth saturates for a step.

    Args:
        element: "hybrid" (E5M2 gradients) or "e4m3".
        history: length of the amax history, in steps.
        algorithm: "max" over the history or its "most_recent" entry.
        margin: binary orders of magnitude left free above amax.
    """

    element: str = "hybrid"
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("hybrid", "e4m3"))
        delayed = Delayed(history=self.history, algorithm=self.algorithm, margin=self.margin)
        x = replace(_fp8("e4m3", (None, None)), delayed=delayed)
        return _by_tensor(x, x, replace(x, element="e5m2" if self.element == "hybrid" else "e4m3"))


@dataclass(frozen=True, kw_only=True)
class FP8Row(Recipe):
    """FP8 with one scale for each row of an operand (row-wise scaling of `torch._scaled_mm`), E4M3 everywhere."""

    def operands(self) -> dict[str, Operands]:
        return _by_tensor(*[_fp8("e4m3", (1, None))] * 3)


@dataclass(frozen=True, kw_only=True)
class FP8Block(Recipe):
    """FP8 with 1×128 blocks for x and dy and 128×128 blocks for w (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    Args:
        element: "e4m3" or "hybrid" (E5M2 gradients).
        power_of_two: scales are powers of two (TE's default) instead of any FP32.
    """

    element: str = "e4m3"
    power_of_two: bool = True

    def operands(self) -> dict[str, Operands]:
        check_choice("element", self.element, ("e4m3", "hybrid"))
        scale = "pow2" if self.power_of_two else "fp32"
        dy = _fp8("e5m2" if self.element == "hybrid" else "e4m3", (1, 128), scale)
        return _by_tensor(_fp8("e4m3", (1, 128), scale), _fp8("e4m3", (128, 128), scale), dy)


@dataclass(frozen=True, kw_only=True)
class Mixed(Recipe):
    """Another recipe for each GEMM: `Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8())`."""

    fprop: Recipe = field(default_factory=BF16)
    dgrad: Recipe = field(default_factory=BF16)
    wgrad: Recipe = field(default_factory=BF16)

    @property
    def name(self) -> str:
        return "Mixed(" + ", ".join(f"{g}={getattr(self, g).name}" for g in GEMMS) + ")" + self._exceptions()

    @property
    def loss_scaling(self) -> LossScaling | None:
        """That of an FP16 part, which may have constants of its own."""
        own = [part.loss_scaling for part in (self.fprop, self.dgrad, self.wgrad) if isinstance(part, FP16)]
        return own[0] if own else super().loss_scaling

    def operands(self) -> dict[str, Operands]:
        dtypes = {getattr(self, g).dtype for g in GEMMS}
        if dtypes != {self.dtype}:
            raise ValueError(f"dtype={self.dtype!r} differs from the parts' dtypes {sorted(dtypes)}: make them one")
        return {g: getattr(self, g).table()[g] for g in GEMMS}


@dataclass(frozen=True, kw_only=True)
class Custom(Recipe):
    """Any table: each GEMM's two operands as specs, None for high precision. For research; a YAML can spell it out."""

    label: str = "Custom"
    fprop: Operands = HIGH_PRECISION
    dgrad: Operands = HIGH_PRECISION
    wgrad: Operands = HIGH_PRECISION

    @property
    def name(self) -> str:
        return self.label + self._exceptions()

    def operands(self) -> dict[str, Operands]:
        return {g: getattr(self, g) for g in GEMMS}
