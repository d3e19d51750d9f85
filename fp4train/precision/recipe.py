"""A recipe: how each operand of the three GEMMs of a linear layer is quantised.

A recipe defines a table of six operands (`fp4train.backends.table`): a `QuantSpec` for each, or
None for high precision. Everything else in the project reads that table; no code tests for a
recipe's class. A research recipe is therefore another table (`Custom`), and "forward in BF16 for
the cooldown" is `recipe.with_high_precision("fprop")`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fp4train.backends.table import (
    DTYPES,
    GEMMS,
    HIGH_PRECISION,
    OPERANDS,
    SHORT,
    Operands,
    Table,
    check_dequantised,
    describe_operand,
    named,
    sourced,
)
from fp4train.precision.loss_scaling import LossScaling
from fp4train.precision.terms import (
    CENTRED,
    Residual,
    Terms,
    check_centred,
    check_residual,
    chosen,
)
from fp4train.quantize import Delayed, QuantSpec, has_tensor_amax
from fp4train.text import check_choice, check_least, step_span, tabulate

if TYPE_CHECKING:
    from fp4train.precision.layers import Layer


def by_tensor(
    x: QuantSpec | None, w: QuantSpec | None, dy: QuantSpec | None
) -> dict[str, Operands]:
    """The operands of a recipe that quantises x, w and dy the same way in every GEMM."""
    return {
        "fprop": Operands(first=x, second=w),
        "dgrad": Operands(first=dy, second=w),
        "wgrad": Operands(first=dy, second=x),
    }


def why_not_shared(w: QuantSpec | None) -> str | None:
    """Why weights that fprop quantises as `w` can share no scale: what their recipe does, as a
    predicate; None: they can.
    """
    if w is None:
        return "quantises no weight in fprop"
    if w.held is not None:
        return "holds the scale of each weight by itself"
    if w.delayed is not None:
        return "takes the scale of each weight from a history of its own"
    if not has_tensor_amax(w):
        return "has no scale of a whole weight, as it is, in fprop"
    return None


BACKWARDS = ("quantised", "dequantised")

_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "int": (int,),
    "float": (int, float),
}
_WORDS = {"bool": "True or False", "str": "text", "int": "a whole number", "float": "a number"}


def check_kinds(recipe: object, prefix: str = "") -> None:
    """TypeError for a switch, word or number of a recipe that is none; it names the field, the
    value and what it is.
    """
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]
        annotation = getattr(field.type, "__name__", field.type)
        value = getattr(recipe, field.name)
        if annotation not in _KINDS:
            continue
        if not isinstance(value, _KINDS[annotation]) or (
            isinstance(value, bool) and annotation != "bool"
        ):
            raise TypeError(f"{prefix}{field.name}={value!r} must be {_WORDS[annotation]}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes; subclasses define their six operands in `operands`.

    Args:
        high_precision: GEMMs (of "fprop", "dgrad", "wgrad") that run unquantised, as exceptions
            from the recipe.
        dtype: dtype of activations and of unquantised GEMMs: "bfloat16", "float16" or "float32".
        outliers: input channels that are multiplied apart, in other operands; None: there are none.
        fused_scales: whether the weights of layers that serving software multiplies as one
            (queries, keys and values; gate and up: `ParameterSpec.fused`) share one global scale,
            from the largest |w| of all. Such software takes one scale for them, so the codes that
            training used can be served as they are.
        backward: "quantised", dgrad and wgrad in the recipe's operands; or "dequantised", both in
            high precision, with dy as it is, and w and x the values of the codes that fprop
            multiplied: the gradients of the forward pass that ran, as a straight-through estimator
            has them (TE: backward_override="dequantized").
        centred: tensors, of "x" and "dy", whose mean over the tokens of a call is taken out before
            they are quantised, and multiplied in high precision (Averis, arXiv:2603.10444).
        residual: second term of fprop's operands, which their codes leave out; None: there is none.
    """

    high_precision: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    outliers: OutlierChannels | None = None
    fused_scales: bool = False
    backward: str = "quantised"
    centred: tuple[str, ...] = ()
    residual: Residual | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        check_choice("backward", self.backward, BACKWARDS)
        check_choice("dtype", self.dtype, DTYPES)
        if isinstance(self.high_precision, str):
            object.__setattr__(self, "high_precision", (self.high_precision,))
        unknown = [g for g in self.high_precision if g not in GEMMS]
        if unknown:
            raise ValueError(
                f"high_precision={unknown[0]!r} is not a GEMM; allowed: {', '.join(GEMMS)}"
            )
        # In canonical order, recipes that mean the same compare equal, also if YAML gave a list.
        object.__setattr__(
            self, "high_precision", tuple(g for g in GEMMS if g in self.high_precision)
        )
        operands = self._with_backward(self.operands())
        check_dequantised(type(self).__name__, operands)
        for gemm, pair in operands.items():
            transforms = [spec and spec.hadamard for spec in pair.both]
            if transforms[0] != transforms[1]:
                raise ValueError(
                    f"{gemm}: hadamard={transforms[0]} of {OPERANDS[gemm][0]} differs from "
                    f"hadamard={transforms[1]} of "
                    f"{OPERANDS[gemm][1]}; the transform cancels only if both operands have "
                    "the same one"
                )
        object.__setattr__(self, "centred", chosen("centred", self.centred, CENTRED))
        check_centred(type(self).__name__, self.centred, operands)
        check_residual(type(self).__name__, self.residual, operands, self.backward)
        if "x" in self.centred and self.residual is not None and "w" in self.residual.tensors:
            raise ValueError(
                "residual: w beside centred: x: the mean of x is multiplied by the codes of w "
                "alone: use recipe.residual.tensors=[x], or recipe.centred=[]"
            )
        self._check_held(operands)
        self._check_delayed(operands)
        self._check_outliers(operands)
        self._check_fused(operands["fprop"].second)
        kept = {g: HIGH_PRECISION if g in self.high_precision else o for g, o in operands.items()}
        if "fprop" in self.high_precision:
            # the values that fprop multiplied are those of the tensors
            kept |= {
                gemm: operands.without_codes_of_fprop
                for gemm, operands in kept.items()
                if operands.why_derived is not None
            }
        object.__setattr__(self, "_table", Table(**kept, dtype=self.dtype, name=self.name))

    def _with_backward(self, operands: dict[str, Operands]) -> dict[str, Operands]:
        """The operands with those of `backward` in dgrad and wgrad."""
        if self.backward == "quantised":
            return operands
        x, w = operands["fprop"].both
        if x is None and w is None:
            raise ValueError(
                f"backward={self.backward!r}: {type(self).__name__} quantises neither x nor w in "
                "fprop, so there are no codes whose values backward could take: use "
                "backward='quantised', or a recipe with a quantised fprop, such as NVFP4"
            )
        return {
            "fprop": operands["fprop"],
            "dgrad": Operands(dequantised=w is not None),
            "wgrad": Operands(dequantised=x is not None),
        }

    def _check_held(self, operands: dict[str, Operands]) -> None:
        """ValueError where held amaxes meet delayed scaling, or one tensor has two periods."""
        periods: dict[str, tuple[str, int]] = {}
        delayed = [gemm for gemm, _, spec in named(operands) if spec is not None and spec.delayed]
        for gemm, tensor, spec in named(operands):
            if spec is None or spec.held is None:
                continue
            if delayed:
                raise ValueError(
                    f"{gemm}, {tensor}: held={spec.held}, and {delayed[0]} has delayed scaling: "
                    "a layer keeps amaxes that are held, or histories; use held=None with "
                    "FP8Delayed, or FP8Current with held"
                )
            earlier_gemm, period = periods.setdefault(tensor, (gemm, spec.held))
            if spec.held != period:
                raise ValueError(
                    f"{gemm}, {tensor}: held={spec.held}, and held={period} in {earlier_gemm}: "
                    f"both take one amax of {tensor}; use one number of steps"
                )

    def _check_delayed(self, operands: dict[str, Operands]) -> None:
        """ValueError where one tensor has two kinds of delayed scaling."""
        kinds: dict[str, tuple[str, Delayed]] = {}
        for gemm, tensor, spec in named(operands):
            if spec is None or spec.delayed is None:
                continue
            earlier_gemm, kind = kinds.setdefault(tensor, (gemm, spec.delayed))
            if spec.delayed != kind:
                raise ValueError(
                    f"{gemm}, {tensor}: delayed={spec.delayed}, and delayed={kind} in "
                    f"{earlier_gemm}: both take one history of {tensor}; use the same in both"
                )

    def _check_outliers(self, operands: dict[str, Operands]) -> None:
        outliers = self.outliers
        if outliers is None:
            return
        if not isinstance(outliers, OutlierChannels) or not isinstance(outliers.recipe, Recipe):
            raise TypeError(f"outliers={outliers!r} must be OutlierChannels with a recipe, or None")
        if outliers.recipe.outliers is not None:
            raise ValueError(
                "outliers.recipe: outlier channels have no outlier channels of their own"
            )
        if not any(pair.quantised for pair in operands.values()):
            raise ValueError(
                f"outliers: {type(self).__name__} quantises nothing, so no channel needs to "
                "be kept apart"
            )
        self.terms.check_apart("outliers")
        outliers.recipe.terms.check_apart("outliers.recipe")
        pairs = [*operands.values(), *outliers.recipe.operands().values()]
        if any(spec is not None and spec.earlier_amax for pair in pairs for spec in pair.both):
            raise ValueError(
                "outliers: delayed scaling has one history per tensor, not one per part of "
                "its channels; held scales one amax"
            )
        try:
            self.of_outliers()
        except ValueError as error:
            raise ValueError(f"outliers.recipe: {error}") from error

    def _check_fused(self, w: QuantSpec | None) -> None:
        if not self.fused_scales:
            return
        why = why_not_shared(w)
        if why is None and self.outliers is not None:
            why = "quantises the outlier channels of each weight apart"
        if why is not None:
            raise ValueError(
                f"fused_scales=True: {type(self).__name__} {why}, so there is none that "
                "several weights could share: "
                "use recipe.fused_scales=false"
            )

    @property
    def terms(self) -> Terms:
        """The second terms of its operands."""
        return Terms(self.centred, self.residual)

    def of_outliers(self) -> Recipe | None:
        """The recipe of the outlier channels: GEMMs in high precision are so in both parts. None:
        there are none.
        """
        if self.outliers is None:
            return None
        part = self.outliers.recipe
        dequantised = self.backward != "quantised" and part.operands()["fprop"].quantised
        return dataclasses.replace(
            part,
            dtype=self.dtype,
            high_precision=(*part.high_precision, *self.high_precision),
            backward=self.backward if dequantised else part.backward,
        )

    def check_part(self, gemm: str) -> None:
        """Raises ValueError where it cannot be the recipe of one GEMM only."""
        if self.outliers is not None:
            raise ValueError(
                f"{gemm}={self.name} has outlier channels, which belong to the three GEMMs of "
                "a layer together: "
                "give them to Mixed(outliers=…), or take a part without them (outliers=None)"
            )
        self.terms.check_apart(f"{gemm}={self.name}, a part of a layer (Mixed has the fields too)")

    def check_layer(self, layer: Layer) -> None:
        """Raises ValueError where no outlier channels can be chosen of `layer`: among the channels
        of a part of it.
        """
        key = "tp" if layer.sources == 1 else "ep"
        if self.outliers is not None and self.quantised and layer.cut is not None:
            raise ValueError(
                f"{self.name} has outlier channels, which are chosen among all input channels "
                "of a layer, and "
                f"parallel.{key} cuts {layer.name}: use parallel.{key}=1, or recipe.outliers=null"
            )
        if self.quantised:
            has_all = layer.cut is None or (layer.cut == "experts" and key == "tp")
            self.terms.check_layer(self.name, layer.name, None if has_all else key)

    @property
    def why_emulated(self) -> str | None:
        """Why only emulation and the reference run it; None: other backends may."""
        if self.outliers is None:
            return self.terms.why_emulated(self.dtype)
        return "outlier channels are multiplied apart, which emulate and reference do"

    def operands(self) -> dict[str, Operands]:
        """The six operands before `high_precision` is applied.

        Raises:
            ValueError: the class defines none.
        """
        raise ValueError(
            f"{type(self).__name__} has no method operands, which says how each GEMM is quantised: "
            "define it, or derive the class from BF16 or another recipe that has one"
        )

    def table(self) -> Table:
        """The six operands that run: GEMM name → operands."""
        return self._table  # type: ignore[attr-defined, no-any-return]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether any GEMM of this recipe is quantised."""
        return self.table().quantised

    @property
    def loss_scaling(self) -> LossScaling | None:
        """How the loss is scaled before backward; None for dtypes whose range needs no scaling."""
        if self.stated_scaling is None and self.dtype == "float16":
            return LossScaling()
        return self.stated_scaling

    @property
    def stated_scaling(self) -> LossScaling | None:
        """The loss scaling that the recipe, or a part of it, states, whatever its dtype needs; None:
        none does.
        """
        if self.outliers is not None:
            return self.outliers.recipe.stated_scaling
        return None

    @property
    def name(self) -> str:
        """Short name for legends: the class, the options that differ from their defaults, the
        exceptions.
        """
        changed = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.default_factory is dataclasses.MISSING:
                default = f.default
            else:
                default = f.default_factory()
            if f.name not in _EXCEPTIONS and value != default:
                changed.append(
                    f"{f.name}={value:g}" if isinstance(value, float) else f"{f.name}={value}"
                )
        return (
            type(self).__name__
            + (f"({', '.join(changed)})" if changed else "")
            + self._exceptions()
        )

    def _exceptions(self) -> str:
        """The last part of the name: scales that weights share, another backward pass, the GEMMs
        in high precision.
        """
        exceptions = []
        if self.fused_scales:
            exceptions.append("fused scales")
        if self.backward != "quantised":
            exceptions.append(f"{self.backward} backward")
        exceptions += self.terms.words(self.dtype)
        if self.high_precision:
            exceptions.append(f"{'+'.join(self.high_precision)} in {SHORT[self.dtype]}")
        return f" with {' and '.join(exceptions)}" if exceptions else ""

    def with_high_precision(self, *gemms: str) -> Recipe:
        """This recipe with `gemms` unquantised: `NVFP4().with_high_precision("fprop")` is the
        paper's cooldown.
        """
        return dataclasses.replace(self, high_precision=(*self.high_precision, *gemms))

    def __str__(self) -> str:
        return self.shown()

    def shown(self, width: int | None = None) -> str:
        """The table of the six operands, one line per operand, in lines of `width` characters;
        None: of any.
        """
        rows: list[tuple[str, ...]] = [
            ("GEMM", "operand", "element", "block", "scale", "rounding", "Hadamard")
        ]
        for (gemm, name), operand in sourced(self.table()).items():
            element, *words = describe_operand(operand, self.dtype)
            element += self.terms.of(gemm, operand, self.dtype)
            rows.append((gemm, name, element, *words))
        lines = [self.name, *tabulate(rows, width=width)]
        if self.outliers is not None:
            apart = self.of_outliers()
        else:
            apart = None
        if self.outliers is not None and apart is not None:
            start = self.outliers.start
            stop = self.outliers.start + self.outliers.steps
            lines += [
                f"outlier channels, {self.outliers.share:.0%} of the input channels, chosen "
                f"in {step_span(start, stop)}:",
                apart.shown(width),
            ]
        return "\n".join(lines)


_EXCEPTIONS = ("high_precision", "fused_scales", "backward", "centred", "residual")
"""Fields that the last part of a recipe's name has."""


@dataclass(frozen=True, kw_only=True)
class OutlierChannels:
    """Input channels of a layer that are multiplied apart, in operands of their own.

    A few channels of x are much larger than the others in nearly every token. In blocks of 16 they
    take the range from their neighbours. They are multiplied apart (OutControl of TetraJet-v2,
    arXiv:2510.27527):

        y = x[:, rest]·w[:, rest]ᵀ + x[:, top]·w[:, top]ᵀ        both parts with operands of their own

    and so in backward: dx and dw are made for each part, dbias once. Which channels are "top" is
        measured in the run:
    the norm of each channel over the tokens of a step is summed over `steps` steps, and those with
    the largest sums are taken. Until then, and in layers too narrow for it, all channels are
    multiplied together.

    The authors' code sums the norms of single forward calls; here the norm is that of all tokens of
    the step, so that it does not depend on how a batch is cut into microbatches and over ranks.

    Args:
        recipe: their operands; its dtype and its GEMMs in high precision are those of the recipe
            that they belong to.
        share: fraction of a layer's input channels, between 0 and 1; the number is rounded up to
            whole multiples.
        start: optimizer steps before the first one that is recorded.
        steps: recorded steps; the channels are chosen after the last one.
        multiple: divisor of the number of channels. 32 is a block of MX; the authors'
            kernels need 128, and their simulations round to 1.
    """

    recipe: Recipe
    share: float = 0.1
    start: int = 500
    steps: int = 50
    multiple: int = 32

    def __post_init__(self) -> None:
        check_kinds(self, "outliers.")
        if not 0 < self.share < 1:
            raise ValueError(
                f"outliers.share={self.share} must lie between 0 and 1: it is a share of the "
                "channels"
            )
        check_least(self, "outliers.", "start", least=0)
        check_least(self, "outliers.", "steps", "multiple")

    def count(self, in_features: int) -> int:
        """The number of outlier channels of a layer; 0 if it would have no other ones."""
        # The tolerance keeps 0.1 of 320 channels at 32, although the product may lie above it.
        count = math.ceil(self.share * in_features / self.multiple - 1e-9) * self.multiple
        return count if count < in_features else 0

    def split_from(self, start: int, stop: int, recorded: int) -> tuple[int, int]:
        """(the first of the steps [start, stop) that multiplies them apart, which may be after the
        last one; the steps recorded then), where `recorded` steps were recorded before.
        """
        missing = self.steps - recorded
        if missing <= 0:
            return start, recorded
        split_step = max(start, self.start) + missing
        return split_step, recorded + max(0, min(split_step, stop) - max(start, self.start))

    def __str__(self) -> str:
        return f"{self.share:.0%} in {self.recipe.name}"
