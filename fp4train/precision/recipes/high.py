"""The recipes that quantise nothing: BF16, FP32, FP16."""

from dataclasses import dataclass, field

from fp4train.backends.table import GEMMS, HIGH_PRECISION, Operands
from fp4train.precision.loss_scaling import LossScaling
from fp4train.precision.recipe import Recipe


class _Unquantised(Recipe):
    def operands(self) -> dict[str, Operands]:
        return dict.fromkeys(GEMMS, HIGH_PRECISION)


@dataclass(frozen=True, kw_only=True)
class BF16(_Unquantised):
    """All three GEMMs in BF16: the baseline for every other recipe."""


@dataclass(frozen=True, kw_only=True)
class FP32(_Unquantised):
    """Everything in float32: the numerical reference, about half the speed of BF16 on a CPU."""

    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class FP16(_Unquantised):
    """GEMMs and activations in IEEE half precision with dynamic loss scaling (Micikevicius et al.
    2018).

    FP16 has 40 binades; gradients of a large model span more, hence the loss scale. `scaling` holds
    its constants.
    """

    dtype: str = "float16"
    scaling: LossScaling = field(default_factory=LossScaling)

    @property
    def stated_scaling(self) -> LossScaling | None:
        return self.scaling
