"""The plan: recipe × policy × phases × backends resolved for a real model, once, before anything is
trained.

A plan holds the `LayerPlan` of every layer (`precision.layer_plan.resolve`) for every stretch of a
run as data. The trainer applies them to the model at the start of each stretch; tables and cost
estimates read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fp4train.backends import Table
from fp4train.hardware import Device
from fp4train.precision.layer_plan import LayerPlan, check_stages, resolve
from fp4train.precision.layers import Layer, find_layers
from fp4train.precision.phases import Phase, Stretch, Timeline
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.precision.report import Row, Section, render, shares, summarise
from fp4train.text import step_span


@dataclass(frozen=True, kw_only=True)
class PlannedStretch(Stretch):
    """Steps [start, stop) of a run in which `recipe` is in force, the reason, and the plan of each
    layer by name.
    """

    layers: Mapping[str, LayerPlan] = field(repr=False)

    @property
    def title(self) -> str:
        return f"{step_span(self.start, self.stop)}: {self.recipe.name} ({self.reason})"

    def tables(self, backend: str) -> list[Table]:
        """The distinct tables that `backend` runs layer by layer."""
        return list(
            dict.fromkeys(
                layer_plan.table
                for layer_plan in self.layers.values()
                if layer_plan.layer_backend == backend
            )
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run: what every layer runs in every stretch of it.

    Args:
        stretches: stretches in order; they cover the run without gaps.
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
        remaining = [replace(s, start=max(s.start, step)) for s in self.stretches if s.stop > step]
        return replace(self, stretches=tuple(remaining or self.stretches[-1:]))

    @property
    def quantised(self) -> bool:
        """Whether any GEMM of the run is quantised."""
        return any(
            layer_plan.quantised
            for stretch in self.stretches
            for layer_plan in stretch.layers.values()
        )

    @property
    def rows(self) -> Iterator[Row]:
        """One row per GEMM, in the order of steps, layers, and their products."""
        for stretch in self.stretches:
            for layer_plan in stretch.layers.values():
                for gemm, features in layer_plan.products:
                    yield Row(
                        start=stretch.start,
                        stop=stretch.stop,
                        layer=layer_plan.layer,
                        gemm=gemm.name,
                        size=layer_plan.size(gemm.name, self.tokens, features),
                        elements=gemm.elements,
                        backend=gemm.backend,
                        why=gemm.why,
                    )

    @property
    def sections(self) -> list[Section]:
        """The rows of each stretch, with its title."""
        rows = list(self.rows)
        return [
            Section(stretch.title, [row for row in rows if row.start == stretch.start])
            for stretch in self.stretches
        ]

    def check_ranks(self, *, stages: int) -> None:
        """`check_stages` of every layer in every stretch."""
        check_stages(
            (layer_plan for stretch in self.stretches for layer_plan in stretch.layers.values()),
            stages=stages,
        )

    def shares(self, start: int) -> dict[str, float]:
        """Share of the linear layers' multiply-adds by elements, in the stretch that starts at step
        `start`.
        """
        return shares((row.elements, row.macs) for row in self.rows if row.start == start)

    def render(self, *, full: bool = False) -> str:
        """One line per group of equal layers; with `full` a row per layer and GEMM."""
        if full:
            return render(self.sections, full=True)
        return summarise(self.sections)

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
    keep_values: bool = False,
) -> Plan:
    """Resolve every GEMM of every layer over the whole run.

    Args:
        layers: layers of the model, in order (`find_layers(model).values()`).
        timeline: recipe, phases and swaps.
        policy: None: every layer follows the recipe.
        tokens: rows of x in one forward pass.
        backend: one for all layers, or one per layer name.
        keep_values: whether layers keep values of x (`LayerPlan.keeping_values`).

    Raises:
        ValueError: a pattern of the policy matches no layer, or a named backend cannot run a
            recipe.
    """
    layers = list(layers)
    if policy is not None:
        policy.check(name for layer in layers for name in (layer.name, *layer.classes))
    stretches = []
    for stretch in timeline.stretches():
        layer_plans = {}
        for layer in layers:
            if isinstance(backend, str):
                layer_backend = backend
            else:
                layer_backend = backend[layer.name]
            layer_plan = resolve(
                layer, stretch.recipe, policy, layer_backend, device, reason=stretch.reason
            )
            layer_plan = layer_plan.within(stretch)
            if keep_values:
                layer_plan = layer_plan.keeping_values()
            layer_plans[layer.name] = layer_plan
        check_fused(stretch.recipe, layer_plans)
        fields = vars(stretch) | {"reason": stretch.reason + stretch.note}
        stretches.append(PlannedStretch(**fields, layers=layer_plans))
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
        backend: backend of layers that are not converted; a converted layer keeps its own.
        device: device of the layers; None: that of the model's first parameter.

    Raises:
        ValueError: the model has no linear layer, a pattern matches none, or a named backend cannot
            run a recipe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan takes a model (torch.nn.Module), not {type(model).__name__}")
    layers = find_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer: there is nothing to plan")
    place = next(model.parameters()).device if device is None else device
    if isinstance(place, Device):
        device = place
    else:
        device = Device.of(place)
    backends = {
        name: str(getattr(model.get_submodule(name), "backend", backend)) for name in layers
    }
    timeline = Timeline(recipe=recipe, steps=steps, phases=phases)
    return make_plan(
        layers.values(), timeline, policy, tokens=tokens, device=device, backend=backends
    )


def check_fused(recipe: Recipe, layer_plans: Mapping[str, LayerPlan]) -> None:
    """Raises ValueError where fused scales of `recipe` have no layers, or policy or mesh divide a
    group.

    Serving software multiplies queries, keys and values by one weight, gate and up by another, and
    takes ONE global scale for each. Weights that were quantised with scales of their own must be
    quantised again for it: with the largest amax of the group 3 % of NVFP4's codes change. Under
    `recipe.fused_scales` training quantises them so from the start, and the codes can be served:

        amax = max over the group of max |w|        S_enc = 448·6 / amax for each of its weights

    A model says which layers form a group (`ParameterSpec.fused`).

    Args:
        layer_plans: the plans of all layers, by name.
    """
    if not recipe.fused_scales:
        return
    if not any(layer_plan.layer.fused for layer_plan in layer_plans.values()):
        raise ValueError(
            f"recipe {recipe.name}: no part of the model says which layers share a scale: say "
            "it in "
            "fp4train_parameters of the modules that hold them (ParameterSpec.fused), or "
            "recipe.fused_scales=false"
        )
    for name, layer_plan in layer_plans.items():
        for other in (layer_plans[name] for name in layer_plan.fused if name in layer_plans):
            if other.fprop.operands.second != layer_plan.fprop.operands.second:
                if layer_plan.fprop.operands.second is None:
                    kept = layer_plan
                else:
                    kept = other
                raise ValueError(
                    f"recipe {recipe.name}: {name} and {other.layer.name} share one scale, "
                    "and fprop quantises their "
                    f"weights differently ({kept.layer.name}: {kept.fprop.why}): keep all or "
                    "none of "
                    f"{', '.join(layer_plan.fused)} in high precision, or take "
                    "recipe.fused_scales=false"
                )
