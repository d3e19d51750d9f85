"""The parts of a recipe, each measured alone: one GEMM, one operand, one layer.

A part is what every layer runs, resolved by the one function that resolves a run's plan
(`precision.layer_plan.resolve`): a layer that is in the part has its plan in the recipe, or in a
recipe of fewer operands, and every other layer has its plan in high precision. Layers outside the
blocks stay in high precision, as in training.

The Hadamard transform of wgrad cancels only if both operands have it. An operand that is quantised
alone is therefore quantised without the transform; wgrad as a whole has it. MS-EDEN is nothing
without its transform: its operands are measured in their GEMM, and not alone. Where backward takes
the values of the codes of an operand of fprop, it does so where that operand is quantised alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fp4train.backends.table import GEMMS, HIGH_PRECISION, OPERANDS, Operands
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device
from fp4train.lab.studies.subject import Subject, digest
from fp4train.precision import FP32, Custom, LayerPolicy, Recipe, Residual, Timeline
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import PlannedStretch, make_plan
from fp4train.quantize import QuantSpec
from fp4train.quantize.rounding import EDEN

EVERY_LAYER = LayerPolicy(first=0, last=0)
"""Every layer of the blocks follows the recipe."""
WHOLE = "everything"
NOTHING = "nothing"
BASELINE = "reference"
OF_THE_RUN = "policy of the run"
CHOSEN = "chosen policy"
GEMM = "gemm"
OPERAND = "operand"
LAYER = "layer"
KINDS = {GEMM: "GEMMs", OPERAND: "operands", LAYER: "layers"}
"""Kinds of parts of a recipe → the plural. The name of a part is its kind, "/" and what is
quantised, or the words above.
"""


@dataclass(frozen=True, kw_only=True)
class NamedPart:
    """A part of a recipe: "everything", "operand/fprop.x", "layer/blocks.0.mlp.up", …"""

    name: str

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def what(self) -> str:
        """The name without its kind."""
        return self.name.partition("/")[2] or self.name


@dataclass(frozen=True, kw_only=True)
class RecipePart(NamedPart):
    """The plan that runs while a part is measured.

    Args:
        stretch: plan of every layer.
        repeats: number of passes over each batch, with other random bits; 1 where nothing is
            rounded stochastically.
        policy: the policy that it is under, where it is not one of the recipe's own parts.
    """

    stretch: PlannedStretch = field(repr=False)
    repeats: int
    policy: LayerPolicy | None = None

    @property
    def key(self) -> str:
        """The name in the record: with a checksum of the policy, if there is one."""
        if self.policy is None:
            return self.name
        return f"{self.name} {digest(self.policy)[:12]}"

    @property
    def stochastic(self) -> bool:
        return any(
            spec.random for plan in self.stretch.layers.values() for spec in plan.table.specs()
        )


class RecipeParts:
    """The parts of `recipe` on the model of `subject`.

    Raises:
        UserError: the recipe quantises nothing, or the model has no layer that it could quantise.
    """

    def __init__(self, subject: Subject, recipe: Recipe, *, repeats: int) -> None:
        if not recipe.quantised:
            raise UserError(
                f"recipe={recipe.name} quantises nothing: there is no part of it to measure. "
                "Name the recipe to study, "
                "recipe=nvfp4"
            )
        if recipe.outliers is not None:
            raise UserError(
                f"recipe={recipe.name} has outlier channels, whose operands are others than "
                "those of the rest: no part "
                "of it is one operand. Study it without them: recipe.outliers=null"
            )
        self.subject = subject
        self.recipe = recipe
        self.repeats = repeats
        self._layers = list(find_layers(subject.run.model).values())
        config = subject.run.config.train
        self._tokens = config.rows(1) * config.seq_len
        self.reference = self._part(BASELINE, FP32(), self.resolved(FP32()))
        self._high = self.resolved(recipe.with_high_precision(*GEMMS))
        self._whole = self.resolved(recipe)
        self.layers = {name: plan for name, plan in self._whole.items() if plan.quantised}
        """The layers that the recipe quantises, by name, in it."""
        if not self.layers:
            if subject.source is None:
                asked = "with the same keys"
            else:
                asked = f"resume={subject.source}"
            raise UserError(
                f"{type(subject.run.model).__name__} has no layer that {recipe.name} quantises: "
                f"fp4train plan {asked} says why"
            )
        self._alone = _operands_alone(recipe)
        self.operands = list(self._alone)
        """The operands that the recipe quantises and that can be quantised alone: "fprop.x"."""
        specs = _operand_specs(recipe)
        self.gemms = list(dict.fromkeys(operand.partition(".")[0] for operand in specs))

    def resolved(
        self, recipe: Recipe, policy: LayerPolicy = EVERY_LAYER
    ) -> Mapping[str, LayerPlan]:
        """The plan of every layer in `recipe` under `policy`.

        Raises:
            UserError: a backend that is named cannot run it, or a pattern of the policy matches no
                layer.
        """
        timeline = Timeline(recipe=recipe, steps=1)
        run = self.subject.run
        device = Device.of(run.device)
        backend = run.config.backend
        with user_errors(ValueError):
            plan = make_plan(
                self._layers, timeline, policy, tokens=self._tokens, device=device, backend=backend
            )
        return plan.stretches[0].layers

    def all(self) -> Iterator[RecipePart]:
        """The parts to measure, in the order in which they are."""
        yield self._part(WHOLE, self.recipe, self._whole)
        yield self._part(NOTHING, self.recipe, self._high)
        of_the_run = self.resolved(self.recipe, self.subject.run.config.policy)
        if any(of_the_run[name].table != plan.table for name, plan in self.layers.items()):
            yield self.under(self.subject.run.config.policy, OF_THE_RUN)
        for gemm in self.gemms:
            high_precision = [other for other in GEMMS if other != gemm]
            yield self._part(
                f"{GEMM}/{gemm}",
                self.recipe,
                self.resolved(self.recipe.with_high_precision(*high_precision)),
            )
        for operand, recipe in self._alone.items():
            yield self._part(f"{OPERAND}/{operand}", self.recipe, self.resolved(recipe))
        for name in self.layers:
            yield self._part(
                f"{LAYER}/{name}", self.recipe, {**self._high, name: self._whole[name]}
            )

    def under(self, policy: LayerPolicy, name: str) -> RecipePart:
        """The recipe under a policy."""
        return replace(
            self._part(name, self.recipe, self.resolved(self.recipe, policy)), policy=policy
        )

    def _part(self, name: str, recipe: Recipe, layers: Mapping[str, LayerPlan]) -> RecipePart:
        stretch = PlannedStretch(start=0, stop=1, recipe=recipe, reason="study", layers=layers)
        part = RecipePart(name=name, stretch=stretch, repeats=1)
        if part.kind == LAYER or not part.stochastic:
            return part
        return replace(part, repeats=self.repeats)


def _residual_of(recipe: Recipe, gemm: str, name: str) -> Residual | None:
    """The second term of one operand; None: it has none."""
    residual = recipe.residual
    if residual is None or gemm != "fprop" or name not in residual.tensors:
        return None
    return replace(residual, tensors=(name,))


def _operand_specs(recipe: Recipe) -> dict[str, QuantSpec]:
    """Operand → its spec, of the operands that `recipe` quantises."""
    return {
        f"{gemm}.{name}": spec
        for gemm, pair in recipe.table().items()
        for spec, name in zip((pair.first, pair.second), OPERANDS[gemm], strict=True)
        if spec is not None
    }


def _operands_alone(recipe: Recipe) -> dict[str, Recipe]:
    """Operand → the recipe that quantises this one alone, of the operands that `recipe` quantises
    and that need no transform.
    """
    alone: dict[str, Recipe] = {}
    for operand, spec in _operand_specs(recipe).items():
        if spec.rounding == EDEN.name:
            continue
        gemm, name = operand.split(".")
        pairs: dict[str, Any] = dict.fromkeys(GEMMS, HIGH_PRECISION)
        if gemm == "fprop":
            pairs |= {
                backward: replace(operands, first=None, accumulator="auto")
                for backward, operands in recipe.table().items()
                if operands.why_derived is not None and OPERANDS[backward][1] == name
            }
        plain = replace(spec, hadamard=None)
        if OPERANDS[gemm][0] == name:
            pairs[gemm] = Operands(first=plain)
        else:
            pairs[gemm] = Operands(second=plain)
        alone[operand] = Custom(
            label=f"{operand} alone",
            dtype=recipe.dtype,
            centred=tuple(tensor for tensor in recipe.centred if tensor == name),
            residual=_residual_of(recipe, gemm, name),
            **pairs,
        )
    return alone
