"""The plan: recipe × policy × phases × backends resolved for a real model, once, before anything is trained.

Only `resolve` decides what a layer runs: operands, backend and reason of each GEMM. A plan holds its results for every
stretch of a run as data. The trainer applies them to the model at the start of each stretch; tables and cost estimates
read them. In other training loops `autocast` calls the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fp4train.backends import GEMMS, HIGH_PRECISION, LAYER_BACKENDS, Choice, Operands, Table, choose, sums_note
from fp4train.hardware import Device
from fp4train.precision.fused import check_fused, fused_note, input_note, shares_scale
from fp4train.precision.layers import Layer, find_layers, misaligned
from fp4train.precision.phases import Phase, Stretch, Timeline
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM of one layer: its operands, its backend, and the reason.

    Args:
        name: "fprop", "dgrad" or "wgrad".
        operands: the quant specs of its two operands.
        dtype: dtype of operands in high precision, and of the result.
        backend: a name of `fp4train.backends`: "te", "native", "emulate", "reference", or "torch" in high precision.
        why: the reason, as shown in tables.
        divided: whether it is in high precision because tensor parallelism cuts through blocks of an operand.
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
    def elements(self) -> str:
        """The element formats of its operands: "E2M1·E2M1", "BF16·BF16"."""
        return self.operands.elements(self.dtype)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The plan of one layer.

    Args:
        layer: its place in the model.
        recipe: the layer's recipe; a policy may replace the run's recipe by another.
        fprop, dgrad, wgrad: its GEMMs.
        outliers: what its outlier channels run, as a layer of so many in features, apart from the GEMMs above.
        readers: the layers that quantise the same x alike, this one included, as the model says (`fp4train_fused`).
    """

    layer: Layer
    recipe: Recipe
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    outliers: LayerPlan | None = None
    readers: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def why_split(self) -> str | None:
        """Why the weight is not quantised as a whole: its recipe has outlier channels, chosen or not yet; or None."""
        return None if self.recipe.outliers is None else "its outlier channels are quantised apart"

    @property
    def fused(self) -> tuple[str, ...]:
        """The layers whose weights share a global scale with this one's, itself included; none: it has its own."""
        return self.layer.fused if self.recipe.fused_scales else ()

    @property
    def parts(self) -> tuple[LayerPlan, ...]:
        """The parts of the in features that are multiplied apart, as layers of their own: the outlier channels last."""
        if self.outliers is None:
            return (self,)
        others = self.layer.in_features - self.outliers.layer.in_features
        return replace(self, layer=replace(self.layer, in_features=others), outliers=None), self.outliers

    @property
    def gemms(self) -> tuple[Gemm, Gemm, Gemm]:
        return self.fprop, self.dgrad, self.wgrad

    @property
    def operands(self) -> dict[str, Operands]:
        """GEMM → the operands that it runs."""
        return {gemm.name: gemm.operands for gemm in self.gemms}

    @property
    def table(self) -> Table:
        """The six operands of the layer's recipe."""
        return self.recipe.table()

    @property
    def layer_backend(self) -> str | None:
        """The backend that runs the three GEMMs together, or None if each GEMM has its own."""
        return self.fprop.backend if self.fprop.backend in LAYER_BACKENDS else None

    @property
    def quantised(self) -> bool:
        return any(gemm.operands.quantised for gemm in self.gemms)

    def size(self, gemm: str, tokens: int) -> tuple[int, int, int]:
        """(rows, columns, contraction) of a product over `tokens` tokens; of experts those of all together."""
        n, k = self.layer.out_features, self.layer.in_features
        tokens = self.layer.rows(tokens)
        return {"fprop": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}[gemm]

    def split_channels(self) -> LayerPlan:
        """This plan where the outlier channels of its recipe are chosen; the same if the layer has none."""
        outliers, recipe, whole = self.recipe.outliers, self.recipe.of_outliers(), self.layer.in_features
        if outliers is None or recipe is None or not self.quantised:
            return self
        gemms: dict[str, Any]
        if not (count := outliers.count(whole)):
            share = f"{outliers.share:.0%} of {whole} in multiples of {outliers.multiple}"
            why = f"no outlier channels: {share} leave no other"
            gemms = {gemm.name: replace(gemm, why=f"{gemm.why}; {why}") for gemm in self.gemms}
            return replace(self, **gemms)
        backend = next(gemm.backend for gemm in self.gemms if gemm.operands.quantised)
        gemms = {"why": f"outlier channels: {count} of {whole}, {recipe.name}", "dtype": recipe.dtype}
        gemms = {
            name: Gemm(name=name, operands=each, backend=backend if each.quantised else "torch", **gemms)
            for name, each in recipe.table().items()
        }
        return replace(self, outliers=LayerPlan(layer=replace(self.layer, in_features=count), recipe=recipe, **gemms))


def resolve(
    layer: Layer, recipe: Recipe, policy: LayerPolicy | None, backend: str, device: Device, *, reason: str | None = None
) -> LayerPlan:
    """The plan of `layer` while `recipe` is in force.

    A GEMM of a shard whose cut divides the blocks of an operand stays in high precision (`misaligned`).

    Args:
        policy: which layers follow the recipe; None: every one.
        backend: "auto", or the name of a backend.
        device: device of the layer's input.
        reason: why `recipe` is in force, if known; shown for GEMMs that a phase leaves in high precision.

    Raises:
        ValueError: a pattern of the policy matches no layer, or the named backend or a layer cannot run the recipe.
    """
    if policy is not None and layer.names:
        policy.check(layer.names)
    own = recipe if policy is None else policy.recipe_for(layer, recipe)
    own.check_splits(layer)
    alike = layer.fused if policy is None else policy.readers(layer, recipe)
    divided = misaligned(layer, own.table())
    own = own.with_high_precision(*divided) if divided else own
    table = own.table()
    if (unconverted := layer.unconverted) is not None:
        own = own.with_high_precision(*GEMMS)
        table, choices = own.table(), dict.fromkeys(GEMMS, Choice("torch", unconverted))
    else:
        cut, fused = layer.cut in ("in", "out"), shares_scale(layer, own)
        choices = choose(table, layer, backend, device, cut=cut, fused=fused, why_split=own.why_split)
    gemms: dict[str, Any] = {}
    for name, (chosen, why, grouped) in choices.items():
        operands = table[name] if unconverted is None else HIGH_PRECISION
        kept = policy.why(layer, name) if policy is not None and recipe.quantised else None
        if unconverted is None and not operands.quantised and recipe.quantised:
            why = divided.get(name) or kept or (reason if reason and name in recipe.high_precision else own.name)
        elif kept and unconverted is None:
            why = f"{kept}; {why}"
        why += fused_note(layer, own, name) + input_note(alike, own, name, chosen, device)
        why += sums_note(operands, name, chosen, device)
        marks = {"divided": name in divided, "grouped": grouped}
        gemms[name] = Gemm(name=name, operands=operands, dtype=own.dtype, backend=chosen, why=why, **marks)
    return LayerPlan(layer=layer, recipe=own, readers=alike, **gemms)


def part_of(plan: LayerPlan, cut: str, parts: int, segments: tuple[int, ...] = ()) -> LayerPlan:
    """Plan of one of `parts` tensor-parallel ranks for its part of a layer: GEMMs whose blocks the cut divides stay in
    high precision. Backends are those of the whole layer.

    Args:
        cut, parts, segments: as of `Layer.part`.
    """
    if parts == 1:
        return plan
    layer = plan.layer.part(cut, parts, segments)
    divided = misaligned(layer, plan.operands)
    kept = {
        name: replace(getattr(plan, name), operands=HIGH_PRECISION, backend="torch", why=why, divided=True)
        for name, why in divided.items()
    }
    recipe = plan.recipe.with_high_precision(*divided) if divided else plan.recipe
    return replace(plan, layer=layer, recipe=recipe, **kept)


@dataclass(frozen=True, kw_only=True)
class PlannedStretch(Stretch):
    """Steps [start, stop) of a run in which `recipe` is in force, the reason, and the plan of each layer by name."""

    layers: Mapping[str, LayerPlan] = field(repr=False)

    @property
    def title(self) -> str:
        return f"steps {self.start}–{self.stop - 1}: {self.recipe.name} ({self.reason})"

    def tables(self, backend: str) -> list[Table]:
        """The distinct tables that `backend` runs layer by layer."""
        return list(dict.fromkeys(each.table for each in self.layers.values() if each.layer_backend == backend))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One GEMM of one layer in one stretch: a row of a table. `size` is (rows, columns, contraction)."""

    start: int
    stop: int
    layer: Layer
    gemm: str
    size: tuple[int, int, int]
    elements: str
    backend: str
    why: str

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        rows, columns, contraction = self.size
        return rows * columns * contraction


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run: what every layer runs in every stretch of it.

    Args:
        stretches: in order; they cover the run without gaps.
        tokens: rows of x in one forward pass.
        device: device of the layers.
    """

    stretches: Sequence[PlannedStretch]
    policy: LayerPolicy | None
    tokens: int
    device: Device

    def at(self, step: int) -> PlannedStretch:
        """The stretch that contains `step`; the last one for steps beyond the end."""
        return next((s for s in self.stretches if s.start <= step < s.stop), self.stretches[-1])

    def since(self, step: int) -> Plan:
        """The plan of the steps from `step` on."""
        rest = [replace(s, start=max(s.start, step)) for s in self.stretches if s.stop > step]
        return replace(self, stretches=tuple(rest or self.stretches[-1:]))

    @property
    def quantised(self) -> bool:
        """Whether any GEMM of the run is quantised."""
        return any(each.quantised for stretch in self.stretches for each in stretch.layers.values())

    @property
    def rows(self) -> Iterator[Row]:
        """One row per GEMM, in the order of steps, layers, parts of their channels, and GEMMs."""
        for stretch in self.stretches:
            for each in stretch.layers.values():
                for part in each.parts:
                    for gemm in part.gemms:
                        yield Row(
                            start=stretch.start,
                            stop=stretch.stop,
                            layer=each.layer,
                            gemm=gemm.name,
                            size=part.size(gemm.name, self.tokens),
                            elements=gemm.elements,
                            backend=gemm.backend,
                            why=gemm.why,
                        )

    def check_ranks(self, *, stages: int) -> None:
        """Raises ValueError where a recipe has outlier channels that layers cannot multiply apart, over so many stages
        of a pipeline; where tensor parallelism cuts a layer `resolve` does."""
        layers = (each for stretch in self.stretches for each in stretch.layers.values())
        having = [(each.recipe.outliers, each) for each in layers if each.quantised and each.recipe.outliers]
        if not having:
            return
        outliers, name = having[0][0], having[0][1].recipe.name
        if stages > 1:
            raise ValueError(
                f"recipe {name}: outlier channels are chosen among all input channels of a layer, over the tokens of "
                "the whole batch, which data ranks share and parallel.tp and parallel.pp do not; use "
                "parallel.dp_shard or parallel.dp_replicate, or recipe.outliers=null"
            )
        if not any(channels.count(each.layer.in_features) for channels, each in having):
            widest = max(each.layer.in_features for _, each in having)
            raise ValueError(
                f"recipe {name}: outliers.share={outliers.share} in multiples of outliers.multiple={outliers.multiple} "
                f"leaves no other channel of any layer (the widest has {widest} input channels); take a smaller "
                "multiple or share, or recipe.outliers=null"
            )

    def shares(self, start: int) -> dict[str, float]:
        """Share of the linear layers' multiply-adds by elements, in the stretch that starts at step `start`."""
        from fp4train.precision.report import shares

        return shares((row.elements, row.macs) for row in self.rows if row.start == start)

    def render(self, *, full: bool = False) -> str:
        """One line per group of equal layers; with `full` a row per layer and GEMM."""
        from fp4train.precision.report import render, summarise

        return render(self, full=True) if full else summarise(self)

    def __str__(self) -> str:
        return self.render()


def make_plan(
    layers: Iterable[Layer],
    timeline: Timeline,
    policy: LayerPolicy | None,
    *,
    tokens: int,
    device: Device,
    backend: str | Mapping[str, str] = "auto",
) -> Plan:
    """Resolve every GEMM of every layer over the whole run.

    Args:
        layers: of the model, in order (`find_layers(model).values()`).
        timeline: recipe, phases and swaps.
        policy: None: every layer follows the recipe.
        tokens: rows of x in one forward pass.
        backend: one for all layers, or one per layer name.

    Raises:
        ValueError: a pattern of the policy matches no layer, or a named backend cannot run a recipe.
    """
    layers = list(layers)
    if policy is not None:
        policy.check(name for layer in layers for name in (layer.name, *layer.classes))
    stretches = []
    for stretch in timeline.stretches():
        found = {}
        for layer in layers:
            wanted = backend if isinstance(backend, str) else backend[layer.name]
            each = resolve(layer, stretch.recipe, policy, wanted, device, reason=stretch.reason)
            found[layer.name] = each.split_channels() if stretch.split else each
        check_fused(stretch.recipe, found)
        why = {None: "", True: "; outlier channels are multiplied apart", False: "; outlier channels not chosen yet"}
        fields = vars(stretch) | {"reason": stretch.reason + why[stretch.split]}
        stretches.append(PlannedStretch(**fields, layers=found))
    return Plan(stretches=tuple(stretches), policy=policy, tokens=tokens, device=device)


def plan(
    model: nn.Module,
    recipe: Recipe,
    policy: LayerPolicy | None = None,
    *,
    phases: Sequence[Phase] = (),
    steps: int = 1,
    tokens: int = 2048,
    backend: str = "auto",
    device: torch.device | str | Device | None = None,
) -> Plan:
    """The plan of any torch model under `fp4train.autocast`: `print` shows it as a table.

    A model that is not converted is planned as if `fp4train.convert` had converted it.

    Args:
        policy: which layers keep high precision; None quantises every layer.
        phases: recipe changes during a run of `steps` steps.
        tokens: rows of x in one forward pass, for the sizes.
        backend: of layers that are not converted; a converted layer keeps its own.
        device: device of the layers; None: that of the model's first parameter.

    Raises:
        ValueError: the model has no linear layer, a pattern matches none, or a named backend cannot run a recipe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan takes a model (torch.nn.Module), not {type(model).__name__}")
    layers = find_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer: there is nothing to plan")
    if device is None:
        device = next(model.parameters()).device
    if not isinstance(device, Device):
        device = Device.of(device)
    backends = {name: str(getattr(model.get_submodule(name), "backend", backend)) for name in layers}
    timeline = Timeline(recipe=recipe, steps=steps, phases=phases)
    return make_plan(layers.values(), timeline, policy, tokens=tokens, device=device, backend=backends)
