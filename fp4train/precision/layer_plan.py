"""The plan of one layer: operands, backend and reason of each of its three GEMMs.

Only `resolve` decides it, for plans of runs as for `autocast` in other training loops; all else
reads a `LayerPlan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fp4train.backends import (
    BACKENDS,
    GEMMS,
    HIGH_PRECISION,
    LAYER_BACKENDS,
    OPERANDS,
    Choice,
    Operands,
    Request,
    Table,
    sourced,
    sums_note,
)
from fp4train.formats import ElementFormat
from fp4train.hardware import Device
from fp4train.precision.layers import Layer, misaligned
from fp4train.precision.phases import Stretch
from fp4train.precision.policy import EVERY_LAYER, LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.quantize import Operand, QuantSpec, has_tensor_amax


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM of one layer: its operands, its backend, and the reason.

    Args:
        name: "fprop", "dgrad" or "wgrad".
        operands: the quant specs of its two operands.
        dtype: dtype of operands in high precision, and of the result.
        backend: a name of `fp4train.backends`: "te", "native", "emulate", "reference", or "torch"
            in high precision.
        why: the reason, as shown in tables.
        divided: whether it is in high precision because tensor parallelism cuts through blocks of
            an operand.
        grouped: whether it multiplies all experts of the layer in one call.
    """

    name: str
    operands: Operands
    dtype: str
    backend: str
    why: str
    divided: bool = False
    grouped: bool = False

    @property
    def formats(self) -> tuple[ElementFormat, ElementFormat]:
        """The formats of its operands; `dtype` in high precision."""
        return self.operands.formats(self.dtype)

    @property
    def elements(self) -> str:
        """The names of the formats of its operands: "E2M1·E2M1", "BF16·BF16"."""
        return self.operands.elements(self.dtype)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The plan of one layer.

    Args:
        layer: its place in the model.
        recipe: the layer's recipe; a policy may replace the run's recipe by another.
        fprop, dgrad, wgrad: its GEMMs.
        outliers: the plan that its outlier channels run, as a layer of so many in features, apart
            from the GEMMs above.
        readers: the layers that quantise the same x alike, this one included, as the model says
            (`ParameterSpec.fused`).
        keeps_values: whether x's form for wgrad is kept for backward as values in BF16, and not as
            codes that wgrad decodes (`train.keep_values`).
        why_values: why a backend that runs the three GEMMs together must have the weight's values;
            None: it takes codes that were made elsewhere, or each GEMM has its own backend.
    """

    layer: Layer
    recipe: Recipe
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    outliers: LayerPlan | None = None
    readers: tuple[str, ...] = field(default=(), repr=False, compare=False)
    why_values: str | None = field(default=None, repr=False, compare=False)
    keeps_values: bool = False

    def keeping_values(self) -> LayerPlan:
        """This plan, which keeps values of x where wgrad multiplies those of codes of its own: not
        those that ranks gather, of experts, of outlier channels, nor of terms.
        """
        x = self.sources["wgrad", "x"]
        others = self.layer.cut or self.layer.experts or self.recipe.outliers or self.recipe.terms
        backend = BACKENDS.get(self.wgrad.backend)
        decodes = x.spec is not None and backend is not None and not backend.takes_codes
        return replace(self, keeps_values=decodes and x.values is None and not others)

    @property
    def why_no_codes(self) -> str | None:
        """Why the weight is not quantised as a whole: its recipe has outlier channels, chosen or
        not yet; or None.
        """
        residual = self.recipe.residual
        if residual is not None and "w" in residual.tensors and self.fprop.operands.quantised:
            return "the residual of its codes is multiplied too"
        if self.recipe.outliers is None:
            return None
        return "its outlier channels are quantised apart"

    @property
    def fused(self) -> tuple[str, ...]:
        """The layers whose weights share a global scale with this one's, itself included; none: it
        has its own.
        """
        if self.recipe.fused_scales:
            return self.layer.fused
        return ()

    @property
    def shared_spec(self) -> QuantSpec | None:
        """The first spec of the weight whose global scale the group shares: what fprop multiplies,
        or what dgrad does or rounds before; None: none is shared.
        """
        specs = (self.fprop.operands.second, self.dgrad.operands.second) if self.fused else ()
        own_specs = (spec.requantises or spec for spec in specs if spec is not None)
        return next((spec for spec in own_specs if has_tensor_amax(spec)), None)

    @property
    def channel_parts(self) -> tuple[LayerPlan, ...]:
        """The parts of the in features that are multiplied apart, as layers of their own: the
        outlier channels last.
        """
        if self.outliers is None:
            return (self,)
        dense_channels = self.layer.in_features - self.outliers.layer.in_features
        return replace(
            self, layer=replace(self.layer, in_features=dense_channels), outliers=None
        ), self.outliers

    @property
    def gemms(self) -> tuple[Gemm, Gemm, Gemm]:
        return self.fprop, self.dgrad, self.wgrad

    @property
    def products(self) -> tuple[tuple[Gemm, int], ...]:
        """All GEMMs that the layer runs, each with the number of in features that it multiplies."""
        return (
            *(
                (gemm, channel_part.layer.in_features)
                for channel_part in self.channel_parts
                for gemm in channel_part.gemms
            ),
            *self._residual_products,
        )

    @property
    def _residual_products(self) -> Iterator[tuple[Gemm, int]]:
        """The products of fprop's residuals, as `products`."""
        residual = self.recipe.residual
        if residual is None or not self.fprop.operands.quantised:
            return
        features = residual.count(self.layer.in_features)
        fprop = self.fprop.operands
        of_tensors = {
            "x": replace(fprop, first=residual.spec),
            "w": replace(fprop, second=residual.spec),
        }
        for tensor, operands in of_tensors.items():
            if tensor in residual.tensors:
                why = f"residual of {tensor}, {features} of {self.layer.in_features} in features"
                yield replace(self.fprop, operands=operands, why=why), features

    @property
    def computation(self) -> tuple[tuple[object, ...], ...]:
        """The properties of `products` that their results depend on, equal for layers that compute
        the same.
        """
        outliers = self.recipe.outliers
        return tuple(
            (
                gemm.name,
                gemm.operands,
                gemm.dtype,
                gemm.backend,
                *((outliers, features) if outliers is not None else ()),
                *((self.recipe.terms,) if self.recipe.terms else ()),
            )
            for gemm, features in self.products
        )

    @property
    def specs(self) -> list[QuantSpec]:
        """The specs of all operands that the layer's recipe quantises, in whichever step."""
        return [
            spec
            for channel_part in self.split_channels().channel_parts
            for spec in channel_part.table.specs()
        ]

    @property
    def operands(self) -> dict[str, Operands]:
        """GEMM → the operands that it runs."""
        return {gemm.name: gemm.operands for gemm in self.gemms}

    @cached_property
    def sources(self) -> dict[tuple[str, str], Operand]:
        """(GEMM, tensor) → the operand that it runs, with where it comes from."""
        return sourced(self.operands)

    @property
    def table(self) -> Table:
        """The six operands of the layer's recipe."""
        return self.recipe.table()

    @property
    def layer_backend(self) -> str | None:
        """The backend that runs the three GEMMs together, or None if each GEMM has its own."""
        if self.fprop.backend in LAYER_BACKENDS:
            return self.fprop.backend
        return None

    @cached_property
    def quantised(self) -> bool:
        """Evaluated once: a call of the layer asks."""
        return any(gemm.operands.quantised for gemm in self.gemms)

    def size(self, gemm: str, tokens: int, k: int | None = None) -> tuple[int, int, int]:
        """(rows, columns, contraction) of a product of `k` in features (None: all) over `tokens`
        tokens; of experts those of all together.
        """
        n = self.layer.out_features
        k = self.layer.in_features if k is None else k
        tokens = self.layer.rows(tokens)
        return {"fprop": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}[gemm]

    def within(self, stretch: Stretch) -> LayerPlan:
        """This plan of the stretch's recipe as it is in the steps of the stretch."""
        return self.split_channels() if stretch.split else self

    def split_channels(self) -> LayerPlan:
        """This plan where the outlier channels of its recipe are chosen; the same if the layer has
        none.
        """
        outliers = self.recipe.outliers
        recipe = self.recipe.of_outliers()
        all_channels = self.layer.in_features
        if outliers is None or recipe is None or not self.quantised:
            return self
        gemms: dict[str, Any]
        if not (count := outliers.count(all_channels)):
            share = f"{outliers.share:.0%} of {all_channels} in multiples of {outliers.multiple}"
            why = f"no outlier channels: {share} leave no other"
            gemms = {gemm.name: replace(gemm, why=f"{gemm.why}; {why}") for gemm in self.gemms}
            return replace(self, **gemms)
        backend = next(gemm.backend for gemm in self.gemms if gemm.operands.quantised)
        gemms = {
            "why": f"outlier channels: {count} of {all_channels}, {recipe.name}",
            "dtype": recipe.dtype,
        }
        gemms = {
            name: Gemm(
                name=name,
                operands=operands,
                backend=backend if operands.quantised else "torch",
                **gemms,
            )
            for name, operands in recipe.table().items()
        }
        return replace(
            self,
            outliers=LayerPlan(
                layer=replace(self.layer, in_features=count), recipe=recipe, **gemms
            ),
        )


def resolve(
    layer: Layer,
    recipe: Recipe,
    policy: LayerPolicy | None,
    backend: str,
    device: Device,
    *,
    reason: str | None = None,
) -> LayerPlan:
    """The plan of `layer` while `recipe` is in force.

    A GEMM of a shard whose cut divides the blocks of an operand stays in high precision
    (`misaligned`).

    Args:
        policy: which layers follow the recipe; None: every one.
        backend: "auto", or the name of a backend.
        device: device of the layer's input.
        reason: why `recipe` is in force, if known; shown for GEMMs that a phase leaves in high
            precision.

    Raises:
        ValueError: a pattern of the policy matches no layer, or the named backend or a layer cannot
            run the recipe.
    """
    policy = policy or EVERY_LAYER
    if layer.names:
        policy.check(layer.names)
    followed = policy.recipe_for(layer, recipe)
    followed.check_layer(layer)
    divided = misaligned(layer, followed.table())
    unquantised = GEMMS if layer.unconverted else tuple(divided)
    if unquantised:
        followed = followed.with_high_precision(*unquantised)
    choices = _choices(layer, followed, backend, device)
    readers = policy.readers(layer, recipe)
    gemms: dict[str, Any] = {}
    for name, choice in choices.items():
        operands = HIGH_PRECISION if layer.unconverted else followed.table()[name]
        of_policy = policy.why(layer, name) if recipe.quantised else None
        of_phase = reason if name in recipe.high_precision else None
        if layer.unconverted:
            why = choice.why
        elif recipe.quantised and not operands.quantised:
            reasons = (divided.get(name), of_policy, operands.why_derived, of_phase)
            why = next(filter(None, reasons), followed.name)
        else:
            why = "; ".join(filter(None, (of_policy, choice.why)))
        notes = (
            derived_note(operands, name),
            fused_note(layer, followed, name, of_run=recipe.fused_scales),
            input_note(readers, followed, name, choice.backend, device),
            sums_note(operands, name, choice.backend, device),
        )
        gemms[name] = Gemm(
            name=name,
            operands=operands,
            dtype=followed.dtype,
            backend=choice.backend,
            why=why + "".join(notes),
            divided=name in divided,
            grouped=choice.grouped,
        )
    why_values = None
    if (layer_backend := LAYER_BACKENDS.get(choices["fprop"].backend)) is not None:
        why_values = layer_backend.why_values(followed.table(), layer, device)
    return LayerPlan(layer=layer, recipe=followed, readers=readers, why_values=why_values, **gemms)


def _choices(layer: Layer, recipe: Recipe, backend: str, device: Device) -> dict[str, Choice]:
    """The backend of each GEMM of a layer that follows `recipe`."""
    if layer.unconverted:
        return dict.fromkeys(GEMMS, Choice("torch", layer.unconverted))
    request = Request(
        table=recipe.table(),
        layer=layer,
        backend=backend,
        device=device,
        cut=layer.cut in ("in", "out"),
        fused=bool(recipe.fused_scales and layer.fused),
        why_emulated=recipe.why_emulated,
    )
    return request.choices()


def derived_note(operands: Operands, gemm: str) -> str:
    """Note on a GEMM whose second operand is derived from the codes of another, behind its reason
    in a plan; "": it is not.
    """
    if operands.why_derived is None or not operands.quantised:
        return ""
    return f"; {OPERANDS[gemm][1]}: {operands.why_derived}"


def fused_note(layer: Layer, recipe: Recipe, gemm: str, *, of_run: bool = False) -> str:
    """Note on a GEMM whose weight has the scale of its group, or has its own where the run's recipe
    has fused scales, behind its reason in a plan; "": neither.

    Args:
        recipe: the recipe of the layer.
        of_run: whether the run's recipe has fused scales.
    """
    if gemm == "wgrad":
        w = None
    else:
        w = recipe.table()[gemm].second
    if not layer.fused or w is None or not has_tensor_amax(w):
        return ""
    if not recipe.fused_scales:
        return "; a scale of its own" if of_run else ""
    return f"; {', '.join(name.rpartition('.')[2] for name in layer.fused)} share a scale"


def input_note(
    readers: Sequence[str], recipe: Recipe, gemm: str, backend: str, device: Device
) -> str:
    """Note on a GEMM whose x a backend quantises once for all layers that read it, behind its
    reason in a plan; "": it does not, or no other layer reads x. (Backends of single GEMMs share
    every x whose bits do not depend on the layer.)
    """
    layer_backend = LAYER_BACKENDS.get(backend)
    if (
        layer_backend is None
        or gemm == "dgrad"
        or len(readers) < 2
        or not layer_backend.shares_input(recipe.table(), device)
    ):
        return ""
    return f"; {', '.join(name.rpartition('.')[2] for name in readers)} share one quantised x"


def check_stages(layers: Iterable[LayerPlan], *, stages: int) -> None:
    """Raises ValueError where a recipe has outlier channels that layers cannot multiply apart, over
    so many stages of a pipeline; where tensor parallelism cuts a layer `resolve` does.
    """
    having = [
        (layer_plan.recipe.outliers, layer_plan)
        for layer_plan in layers
        if layer_plan.recipe.outliers and layer_plan.quantised
    ]
    if not having:
        return
    outliers = having[0][0]
    name = having[0][1].recipe.name
    if stages > 1:
        raise ValueError(
            f"recipe {name}: outlier channels are chosen among all input channels of a layer, "
            "over the tokens of "
            "the whole batch, which data ranks share and parallel.tp and parallel.pp do not; use "
            "parallel.dp_shard or parallel.dp_replicate, or recipe.outliers=null"
        )
    if not any(channels.count(layer_plan.layer.in_features) for channels, layer_plan in having):
        widest = max(layer_plan.layer.in_features for _, layer_plan in having)
        raise ValueError(
            f"recipe {name}: outliers.share={outliers.share} in multiples of "
            f"outliers.multiple={outliers.multiple} "
            f"leaves no other channel of any layer (the widest has {widest} input channels); "
            "take a smaller "
            "multiple or share, or recipe.outliers=null"
        )
