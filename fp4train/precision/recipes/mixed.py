"""Tables composed by the user: one recipe per GEMM, or one spec per operand."""

from dataclasses import dataclass, field, replace

from fp4train.backends.table import GEMMS, HIGH_PRECISION, Operands
from fp4train.precision.loss_scaling import LossScaling
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes.high import BF16


@dataclass(frozen=True, kw_only=True)
class Mixed(Recipe):
    """One recipe per GEMM: `Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8())`.

    Args:
        label: its name; empty: the names of its parts, "Mixed(NVFP4/MXFP8/MXFP8)".
    """

    label: str = ""
    fprop: Recipe = field(default_factory=BF16)
    dgrad: Recipe = field(default_factory=BF16)
    wgrad: Recipe = field(default_factory=BF16)

    def __post_init__(self) -> None:
        for gemm in GEMMS:
            if not isinstance(part := getattr(self, gemm), Recipe):
                raise TypeError(f"{gemm}={part!r} must be a recipe, for instance NVFP4()")
            part.check_part(gemm)
            if part.fused_scales:  # weights belong to fprop and dgrad together
                object.__setattr__(self, gemm, replace(part, fused_scales=False))
                object.__setattr__(self, "fused_scales", True)
        super().__post_init__()

    @property
    def name(self) -> str:
        parts = "/".join(getattr(self, gemm).name for gemm in GEMMS)
        return (self.label or f"Mixed({parts})") + self._exceptions()

    @property
    def stated_scaling(self) -> LossScaling | None:
        """Loss scaling of the first part that states one."""
        for part in (self.fprop, self.dgrad, self.wgrad):
            if part.stated_scaling is not None:
                return part.stated_scaling
        return super().stated_scaling

    def operands(self) -> dict[str, Operands]:
        dtypes = {getattr(self, g).dtype for g in GEMMS}
        if dtypes != {self.dtype}:
            raise ValueError(
                f"dtype={self.dtype!r} differs from the parts' dtypes {sorted(dtypes)}: use "
                "one dtype"
            )
        return {g: getattr(self, g).table()[g] for g in GEMMS}


@dataclass(frozen=True, kw_only=True)
class Custom(Recipe):
    """Any table: the two operands of each GEMM as specs, None for high precision. YAML can define
    one.

    Args:
        scaling: dynamic loss scaling, for gradients below the range of their scales; None: none.
    """

    label: str = "Custom"
    fprop: Operands = HIGH_PRECISION
    dgrad: Operands = HIGH_PRECISION
    wgrad: Operands = HIGH_PRECISION
    scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        for gemm in GEMMS:
            if not isinstance(operands := getattr(self, gemm), Operands):
                if isinstance(operands, Recipe):
                    hint = "; Mixed takes a recipe for each GEMM"
                else:
                    hint = ""
                raise TypeError(
                    f"{gemm}={operands!r} must be Operands(first=…, second=…) of QuantSpecs{hint}"
                )
        super().__post_init__()

    @property
    def name(self) -> str:
        return self.label + self._exceptions()

    @property
    def stated_scaling(self) -> LossScaling | None:
        return self.scaling or super().stated_scaling

    def operands(self) -> dict[str, Operands]:
        return {g: getattr(self, g) for g in GEMMS}
